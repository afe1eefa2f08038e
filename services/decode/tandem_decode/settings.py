"""Settings of the decode pod."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from tandem_pod.settings import EnginePodSettings
from tandem_service.settings import Port
from tandem_service.tls import Role

if TYPE_CHECKING:
    from tandem_engine.assemble import EngineConfig


class DecodeSettings(EnginePodSettings):
    """tandem-decode: owns requests, receives KV, and decodes with tree speculation."""

    role = Role.DECODE

    kv_host: str = "127.0.0.1"
    """address of the KV ingress, as prefill pods reach it"""
    kv_port: Port = 0
    """port of the KV ingress; 0 takes a free one"""
    lookahead: str = ""
    """host:port of the lookahead service; empty: drafts come from the sequence itself only"""
    # Not SpeculationMode: --help would show its members' names.
    speculation: Literal["off", "local", "chain", "global"] = "global"
    """sources of drafts; local: the sequence's own text; global: also the tenant's shared text"""
    max_tenants: Annotated[int, Field(ge=1)] = 32
    """most tenants whose shared text is kept for drafts; the least recently used ones are dropped"""
    shared_text_bytes: Annotated[int, Field(ge=1 << 20)] = 512 << 20
    """memory for the shared text of all tenants; beyond it, tenants without running requests are dropped, and
    each of the others keeps an equal part"""
    draft_nodes: Annotated[int, Field(ge=0, le=63)] = 31
    """most draft tokens verified per sequence and step"""
    local_prefill_tokens: Annotated[int, Field(ge=0)] = 384
    """prompts with fewer uncached tokens than this are computed here, although that delays decoding
    requests; `tandem up` sets 1,536"""
    idle_prefill_tokens: Annotated[int, Field(ge=0)] = 512
    """the same limit while the pod is idle"""

    def engine_config(self, *, max_draft_nodes: int, decodes: bool = True) -> EngineConfig:
        config = super().engine_config(max_draft_nodes=max_draft_nodes, decodes=decodes)
        return config if self.lookahead else replace(config, shared_text_bytes=0)
