"""Settings of the lookahead service; the common ones are in tandem_service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from tandem_service.settings import PodSettings


class LookaheadSettings(PodSettings):
    """The service that shares accepted text."""

    redis_url: str = ""
    """redis:// or unix:// URL; empty: REDIS_URL, else a server of our own"""
    data_dir: Path | None = None
    """folder of our own Redis server's files; empty: $TANDEM_HOME/lookahead, else in the XDG cache folder"""
    max_tokens: Annotated[int, Field(ge=1024)] = 1_000_000
    """tokens of text kept per namespace, about 5 bytes each; the oldest requests' go first"""
    max_namespaces: Annotated[int, Field(ge=1)] = 256
    """most namespaces held at once"""
    stream_length: Annotated[int, Field(ge=16)] = 20_000
    """span batches kept in a namespace's Redis stream, about"""
    backlog_tokens: Annotated[int, Field(ge=0)] = 1_000_000
    """tokens kept for Redis while it is away; beyond, the oldest are dropped from what is shared"""
    snapshot_interval_s: Annotated[float, Field(gt=0.0)] = 30.0
    """seconds between published snapshots of a namespace that has changed"""
