"""Settings of the prefill pod."""

from __future__ import annotations

from tandem_service.engine_settings import EnginePodSettings


class PrefillSettings(EnginePodSettings):
    """tandem-prefill: computes prompts and ships their KV."""
