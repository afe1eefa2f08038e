"""A ZeroMQ proxy between KV senders and one KV receiver, which damages what passes.

KV sender -> ROUTER (tickets name this one) -> FrameFaults.frame -> DEALER -> KV receiver
          <-                                <- FrameFaults.reply <-
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time

import zmq
from tandem_engine.transport.codec import Frame, decode

from tandem_chaos.frame_faults import Delivery, FrameFault, FrameFaults

_POLL_MS = 50
#: The name of the connection that sends forged frames; a peer of ROUTER has a longer one.
_FORGER = b""


class FrameProxy:
    """Runs from its construction to `close`."""

    def __init__(self, receiver_endpoint: str, faults: FrameFaults) -> None:
        self._receiver = receiver_endpoint
        self.faults = faults
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._poller = zmq.Poller()
        #: By peer of the front.
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        #: (when, order, back, what)
        self._waiting: list[tuple[float, int, zmq.Socket[bytes], Delivery]] = []
        self._order = itertools.count()
        self._cut_until = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="frame-proxy", daemon=True)
        self._thread.start()

    def cut(self, seconds: float) -> None:
        """Loses everything in both directions for this time."""
        self._cut_until = time.monotonic() + seconds

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        self._poller.register(self._front, zmq.POLLIN)
        while not self._stopping.is_set():
            wait_ms = _POLL_MS
            if self._waiting:
                wait_ms = max(0, min(_POLL_MS, int((self._waiting[0][0] - time.monotonic()) * 1000) + 1))
            for socket, _ in self._poller.poll(wait_ms):
                if socket is self._front:
                    self._take_frames()
                else:
                    self._take_replies(socket)
            self._send_due()

    def _back(self, peer: bytes) -> zmq.Socket[bytes]:
        back = self._backs.get(peer)
        if back is None:
            back = self._backs[peer] = self._context.socket(zmq.DEALER)
            back.linger = 0
            back.sndhwm = 0
            back.connect(self._receiver)
            self._poller.register(back, zmq.POLLIN)
        return back

    def _is_cut(self) -> bool:
        is_cut = time.monotonic() < self._cut_until
        if is_cut:
            self.faults.num_faults[FrameFault.CUT] += 1
        return is_cut

    def _take_frames(self) -> None:
        while True:
            try:
                peer, *parts = self._front.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            frame = decode(parts[0])
            assert isinstance(frame, Frame)  # what a KV sender sends
            if self._is_cut():
                continue
            now = time.monotonic()
            for delivery in self.faults.frame(frame, parts, now):
                back = self._back(_FORGER if delivery.is_forged else peer)
                if delivery.delay_s > 0:
                    due = now + delivery.delay_s
                    heapq.heappush(self._waiting, (due, next(self._order), back, delivery))
                else:
                    back.send_multipart(delivery.parts)

    def _take_replies(self, back: zmq.Socket[bytes]) -> None:
        peer = next(peer for peer, socket in self._backs.items() if socket is back)
        while True:
            try:
                reply = back.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            if peer == _FORGER or self._is_cut():
                continue
            for one in self.faults.reply(reply):
                self._front.send_multipart([peer, one])

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, back, delivery = heapq.heappop(self._waiting)
            for parts in delivery.take():
                back.send_multipart(parts)
