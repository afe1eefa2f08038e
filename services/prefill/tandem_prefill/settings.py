"""Settings of the prefill pod."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from tandem_pod.settings import EnginePodSettings
from tandem_service.tls import Role


class PrefillSettings(EnginePodSettings):
    """tandem-prefill: computes prompts and sends their KV to decode pods."""

    role = Role.PREFILL

    nice: Annotated[int, Field(ge=0, le=19)] = 0
    """CPU priority given up to decode pods on the same machine; `tandem up` sets 6"""
