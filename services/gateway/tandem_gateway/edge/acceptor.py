"""Accepts connections of the HTTP port, at most as many as it has places for.

A connection has its place from accept to close, TLS handshake included. If all are taken, a new connection
gets the place of a *stranger*: a connection on which no request of a known caller runs. It is the oldest one
of the address that has most of them, so callers from other addresses keep theirs. Without strangers a few
connections more are served, for health checks.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import ssl
from collections.abc import Callable
from functools import partial

import structlog

_HANDSHAKE_S = 5.0
#: Time without accepting, when there are no descriptors.
_PAUSE_S = 0.1
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
#: Largest number of connections beyond the limit, and its share of the limit.
_MAX_BEYOND, _BEYOND_SHARE = 64, 4
#: Minimum turns of the loop for which a connection keeps its place. In them a request with a key is
#: recognised. More turns slow down accepting, because each turn also serves strangers' connections.
_MIN_TURNS = 8


def num_beyond(max_connections: int) -> int:
    """Connections beyond the limit, which health checks may use."""
    return min(_MAX_BEYOND, max(max_connections // _BEYOND_SHARE, 1))


class Place:
    """The place of one connection."""

    def __init__(self, acceptor: Acceptor, address: str, *, is_beyond: bool) -> None:
        self._acceptor = acceptor
        self.address = address
        #: Whether it is beyond the limit.
        self.is_beyond = is_beyond
        #: Ends the connection without delay.
        self.abort: Callable[[], object] = lambda: None

    def keep(self, is_kept: bool) -> None:
        """`is_kept`: no new connection may get this place."""
        self._acceptor.keep(self, is_kept)

    def leave(self) -> None:
        self._acceptor.leave(self)


class Acceptor:
    """Accepts from creation to `close`. It replaces asyncio's server, which counts nothing before the end of
    a TLS handshake, accepts up to `backlog` connections in one turn of the loop, and without descriptors logs
    each attempt."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Place], asyncio.Protocol],
        *,
        max_connections: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        listener.setblocking(False)
        self._make_protocol = make_protocol
        self._max_connections = max_connections
        self._tls = tls
        self._places: set[Place] = set()
        #: By address; the first one of each became a stranger first.
        self._strangers: dict[str, dict[Place, None]] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accepts no more; connections continue after their TLS handshake."""
        self._accepting.cancel()
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._opening, return_exceptions=True)

    def keep(self, place: Place, is_kept: bool) -> None:
        if place not in self._places:
            return
        if is_kept:
            self._forget_stranger(place)
        else:
            self._strangers.setdefault(place.address, {}).setdefault(place)

    def leave(self, place: Place) -> None:
        self._places.discard(place)
        self._forget_stranger(place)

    def _forget_stranger(self, place: Place) -> None:
        of_address = self._strangers.get(place.address, {})
        of_address.pop(place, None)
        if not of_address:
            self._strangers.pop(place.address, None)

    def _displace(self) -> bool:
        """Ends the connection of a stranger; returns whether there was one."""
        if not self._strangers:
            return False
        of_address = max(self._strangers.values(), key=len)
        place = next(iter(of_address))
        self.leave(place)
        place.abort()
        return True

    async def _accept(self) -> None:
        loop, log = asyncio.get_running_loop(), structlog.get_logger("tandem.http")
        logged_at, per_turn = -60.0, max(self._max_connections // _MIN_TURNS, 1)
        for number in itertools.count(1):
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    if loop.time() > logged_at + 60.0:
                        logged_at = loop.time()
                        log.error("a connection cannot be accepted", reason=error.strerror)
                    self._displace()
                    await asyncio.sleep(_PAUSE_S)
                else:  # the client has left
                    await asyncio.sleep(0)
                continue
            excess = len(self._places) + 1 - self._max_connections
            if excess > 0 and self._displace():
                excess -= 1
            if excess > num_beyond(self._max_connections):
                connection.close()
            else:
                place = Place(self, address[0], is_beyond=excess > 0)
                self._places.add(place)
                self.keep(place, False)
                task = asyncio.create_task(self._open(connection, place))
                self._opening.add(task)
                place.abort = task.cancel
                task.add_done_callback(partial(self._opened, connection))
            # sock_accept does not wait while connections are pending.
            if number % per_turn == 0:
                await asyncio.sleep(0)

    async def _open(self, connection: socket.socket, place: Place) -> None:
        limit_s = None if self._tls is None else _HANDSHAKE_S
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_protocol(place),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=limit_s,
            )
        except (OSError, asyncio.CancelledError):  # SSLError is an OSError
            place.leave()

    def _opened(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if task.cancelled():  # it had not begun
            connection.close()
