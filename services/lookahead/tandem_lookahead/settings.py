"""Settings of the lookahead service; the common ones are in tandem_service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode
from tandem_service.settings import PodSettings


def _split(value: object) -> tuple[str, ...]:
    """ "a,b" (or several such strings) -> ("a", "b")."""
    items = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    return tuple(name.strip() for item in items for name in str(item).split(",") if name.strip())


#: Tenants, given as `one,other`.
Tenants = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class LookaheadSettings(PodSettings):
    """The service that shares accepted text."""

    redis_url: str = ""
    """redis://, rediss:// (TLS) or unix:// URL, or a cluster's; empty: REDIS_URL, else a server of our own"""
    redis_ca_file: Path | None = None
    """certificates by which the server's own is judged (rediss://); unset: the system's"""
    redis_cert_file: Path | None = None
    """our certificate, where the server asks for one (rediss://)"""
    redis_key_file: Path | None = None
    """the key of our certificate, if it is not in the same file"""
    data_dir: Path | None = None
    """folder of our own Redis server's files; empty: $TANDEM_HOME/lookahead, else in the XDG cache folder"""
    promotion_requests: Annotated[int, Field(ge=1, le=16)] = 2
    """text is shared once so many distinct requests of a tenant have generated it; 1: at once"""
    share_prompts: Tenants = ()
    """tenants whose prompts are shared like what they generate, as tenant,tenant...; empty: nobody's"""
    max_bytes: Annotated[int, Field(ge=1 << 20)] = 64 << 20
    """memory for the text of one namespace, 32 bytes a token; beyond, what is worth least goes"""
    max_total_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    """memory for the text of all namespaces; beyond, the largest give up some"""
    half_life_s: Annotated[float, Field(gt=0.0)] = 86_400.0
    """seconds in which a use of a text comes to be worth half"""
    max_namespaces: Annotated[int, Field(ge=1)] = 256
    """most namespaces held at once"""
    stream_length: Annotated[int, Field(ge=16)] = 20_000
    """span batches kept in a namespace's Redis stream, about"""
    backlog_tokens: Annotated[int, Field(ge=0)] = 1_000_000
    """tokens kept for Redis while it is away; beyond, the oldest are dropped from what is shared"""
    snapshot_interval_s: Annotated[float, Field(gt=0.0)] = 30.0
    """seconds between published snapshots of a namespace that has changed"""
