"""gRPC options of every channel and server, and the function that opens channels."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio

from tandem_service.tls import PodTls, Role

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

#: Pings on channels to pods detect a dead host (which sends no RST) in about two seconds: a ping each second,
#: one second to answer.
_POD_KEEPALIVE_MS = 1000
#: Pods ping their callers less often: a caller may be paused for a moment, and only computation for a dead
#: one is lost.
_CALLER_KEEPALIVE_MS = 5_000
#: On public ports, whose callers may be silent for seconds: they roam, or packets are lost.
_PUBLIC_KEEPALIVE_MS = 20_000
#: Bytes that a peer may send ahead on a stream.
_WINDOW_BYTES = 1 << 20
#: A public connection without a call is closed after this time.
MAX_IDLE_MS = 15_000
#: Longest TLS handshake; gRPC's default is two minutes, in which a silent connection takes a place.
HANDSHAKE_MS = 5_000


def _keepalive(interval_ms: int) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", interval_ms),
        # Without it gRPC 1.80 waits up to a minute for the answer to a ping, despite the line above.
        ("grpc.http2.ping_timeout_ms", interval_ms),
        # gRPC pings with most data to measure the bandwidth. One of these pings would be under way whenever
        # this process is paused, and its time over when it continues.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Reconnects to a restarted pod within a second; gRPC's default backs off for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Pods are reached by address, without an HTTP proxy from the environment.
    ("grpc.enable_http_proxy", 0),
    # Channels share no subchannels, so closing one does not depend on another.
    ("grpc.use_local_subchannel_pool", 1),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (*_keepalive(_POD_KEEPALIVE_MS), *_CHANNEL_OPTIONS)
#: Options of channels to a gateway.
_PUBLIC_CHANNEL_OPTIONS = (*_keepalive(_PUBLIC_KEEPALIVE_MS), *_CHANNEL_OPTIONS)


def server_options(
    max_request_bytes: int, max_connections: int | None = None, max_connection_age_s: float = 0.0
) -> tuple[tuple[str, int], ...]:
    """Options of a server. A request over the limit fails with RESOURCE_EXHAUSTED before it is parsed or
    reaches an interceptor. `max_connections` None: no limit. A connection of the maximum age (within 10 %; 0:
    none) takes no further calls, and its client opens another one; its running calls continue."""
    keepalive_ms, least_ms = _CALLER_KEEPALIVE_MS, _POD_KEEPALIVE_MS // 2
    public: tuple[tuple[str, int], ...] = (("grpc.http2.max_ping_strikes", 0),)
    if max_connections is not None:
        keepalive_ms, least_ms = _PUBLIC_KEEPALIVE_MS, _PUBLIC_KEEPALIVE_MS // 2
        public = (
            ("grpc.max_allowed_incoming_connections", max_connections),
            # Closes connections without a call; clients connect again when they have one.
            ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
        )
    if max_connection_age_s:
        public += (("grpc.max_connection_age_ms", round(max_connection_age_s * 1000)),)
    return (
        *public,
        *_keepalive(keepalive_ms),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_request_bytes),
        # With SO_REUSEPORT two servers on one port would share its calls without an error.
        ("grpc.so_reuseport", 0),
        # Accept the pings of channels with these options; by default the server answers them with GOAWAY
        # "too_many_pings".
        ("grpc.http2.min_ping_interval_without_data_ms", least_ms),
    )


def open_channel(target: str, tls: PodTls | None = None, role: Role | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`; connects on first use. Close it with `await channel.close()`.

    With `tls` it connects only to a server whose certificate is of `role`.
    """
    if tls is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(target, tls.channel_credentials(), options=_tls_options(role))


def open_sync_channel(target: str, tls: PodTls | None = None, role: Role | None = None) -> grpc.Channel:
    """A channel for threads; see `open_channel`."""
    if tls is None:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(target, tls.channel_credentials(), options=_tls_options(role))


def public_target(target: str, ca_file: Path | None) -> tuple[str, grpc.ChannelCredentials | None]:
    """host:port of a gateway, and credentials; None: plaintext. https:// or a PEM file of authorities means
    TLS; without the file the system's authorities apply. Raises OSError."""
    address = target.removeprefix("http://").removeprefix("https://")
    if not target.startswith("https://") and ca_file is None:
        return address, None
    return address, grpc.ssl_channel_credentials(None if ca_file is None else ca_file.read_bytes())


def open_public_channel(target: str, ca_file: Path | None = None) -> grpc.aio.Channel:
    """A channel to a gateway's public port; see `public_target`."""
    address, credentials = public_target(target, ca_file)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_PUBLIC_CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=_PUBLIC_CHANNEL_OPTIONS)


def open_public_sync_channel(target: str, ca_file: Path | None = None) -> grpc.Channel:
    """A channel for threads; see `open_public_channel`."""
    address, credentials = public_target(target, ca_file)
    if credentials is None:
        return grpc.insecure_channel(address, options=_PUBLIC_CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, options=_PUBLIC_CHANNEL_OPTIONS)


def _tls_options(role: Role | None) -> tuple[tuple[str, int | str], ...]:
    if role is None:
        raise ValueError("a channel with TLS needs the role of its server")
    return (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", role.dns_name))
