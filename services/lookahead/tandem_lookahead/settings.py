"""Settings of the lookahead service; the common ones are in tandem_service."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from tandem_service.settings import Entries, PodSettings, RedisSettings
from tandem_service.tls import Role


class LookaheadSettings(PodSettings, RedisSettings):
    """Settings of `tandem-lookahead`."""

    role = Role.LOOKAHEAD

    min_requests: Annotated[int, Field(ge=1, le=16)] = 2
    """distinct requests of a tenant that must generate a text before it is shared; 1: shared at once"""
    share_prompts: Entries = ()
    """tenants whose prompts are shared like their outputs, as tenant,tenant...; empty: none"""
    max_bytes: Annotated[int, Field(ge=1 << 20)] = 64 << 20
    """memory for the text of one namespace, 32 bytes per token; beyond, the least valuable text is dropped"""
    max_total_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    """memory for the text of all namespaces; beyond, the largest ones drop text"""
    half_life_s: Annotated[float, Field(gt=0.0)] = 86_400.0
    """seconds after which a use of a text counts half"""
    max_namespaces: Annotated[int, Field(ge=1)] = 256
    """most namespaces in memory; beyond, the one without a pod for the longest time leaves it"""
    idle_s: Annotated[float, Field(gt=0.0)] = 3600.0
    """seconds without a pod after which a namespace leaves memory; Redis keeps it"""
    redis_ttl_s: Annotated[float, Field(ge=60.0)] = 7 * 86_400.0
    """seconds without a pod after which a namespace leaves Redis"""
    stream_length: Annotated[int, Field(ge=16)] = 20_000
    """approximate number of entries kept in a namespace's Redis stream"""
    stream_bytes: Annotated[int, Field(ge=1 << 16)] = 16 << 20
    """approximate memory of a namespace's Redis stream; snapshots hold the text before"""
    backlog_tokens: Annotated[int, Field(ge=0)] = 1_000_000
    """tokens kept for Redis while it does not answer; beyond, the oldest are dropped"""
    snapshot_interval_s: Annotated[float, Field(gt=0.0)] = 30.0
    """seconds between published snapshots of a namespace that changed"""
