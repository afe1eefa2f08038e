"""Connects to Redis by redis://, rediss:// (TLS) or unix:// URLs, with user and password in the URL.

A server that is part of a cluster gets a cluster client.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError, ResponseError

#: What a call may raise when Redis does not answer. The last two are redis-py's when another task closes the
#: connection meanwhile.
NO_ANSWER = (RedisError, OSError, TimeoutError, AttributeError, RuntimeError)
#: A dead Redis host is detected in this time.
_SOCKET_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class RedisAddress:
    """URL of Redis. The files matter for rediss:// only."""

    url: str
    #: Certificates that verify the server's; None: the system's.
    ca_file: Path | None = None
    #: Client certificate, if the server wants one.
    cert_file: Path | None = None
    key_file: Path | None = None


def is_redis_url(url: str) -> bool:
    """Whether redis-py can read it, or it is empty. The error of redis-py shows a part of the password."""
    try:
        parts = urlsplit(url)
        parse_url(url or "redis://")
    except ValueError:
        return False
    # A password that is not encoded ends the host: what follows it is taken for a path.
    return "@" not in f"{parts.path}{parts.query}{parts.fragment}"


async def connect(address: RedisAddress) -> Any:
    """A client of the server or of its cluster. Raises RedisError, OSError."""
    options: dict[str, Any] = {
        "socket_connect_timeout": _SOCKET_TIMEOUT_S,
        "socket_timeout": _SOCKET_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),  # the hub retries
        "protocol": 2,
    }
    if address.url.startswith("rediss:"):
        files = {
            "ssl_ca_certs": address.ca_file,
            "ssl_certfile": address.cert_file,
            "ssl_keyfile": address.key_file,
        }
        options |= {name: str(path) for name, path in files.items() if path is not None}
    client = redis.Redis.from_url(address.url, **options)
    try:
        if not await _is_part_of_cluster(client):
            return client
    except BaseException:
        await client.aclose()
        raise
    await client.aclose()
    cluster = RedisCluster.from_url(address.url, **options)
    await cluster.initialize()
    return cluster


def is_cluster(client: object) -> bool:
    return isinstance(client, RedisCluster)


async def _is_part_of_cluster(client: Any) -> bool:
    try:
        info = await client.info("cluster")
    except (NoPermissionError, ResponseError):  # not permitted
        return False
    return bool(info.get("cluster_enabled"))
