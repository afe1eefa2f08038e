"""The requests of a run: prompts with their SLO class, tenant and length.

    prompt   from the workload
    class    --mix      ┐ drawn from the seed and the request's number,
    tenant   --tenants  ┘ or read from a trace

Requests do not depend on the rate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem_core.slo import SloTarget

from tandem_cli.bench import BenchError
from tandem_cli.bench.prompts import Prompt


@dataclass(frozen=True)
class Tenant:
    """A sender of requests. No output contains the key."""

    name: str = ""
    key: str | None = field(default=None, repr=False)


NO_TENANT = Tenant()


@dataclass(frozen=True)
class Request:
    """One request. `slo.name` is its class; "" sends none."""

    index: int
    prompt: Prompt
    slo: SloTarget
    max_tokens: int
    tenant: Tenant = NO_TENANT
    #: Whether to send the objectives, because they differ from those of the class.
    sends_objectives: bool = False


def plain_requests(
    prompts: Sequence[Prompt], slo: SloTarget, max_tokens: int, tenant: Tenant = NO_TENANT
) -> list[Request]:
    """Requests of one class and tenant."""
    return [Request(index, prompt, slo, max_tokens, tenant) for index, prompt in enumerate(prompts)]


def parse_mix(text: str) -> dict[str, float]:
    """Weights of SLO classes, from "interactive=.6,chat=.4". Raises BenchError."""
    weights: dict[str, float] = {}
    for part in _parts(text):
        name, _, weight = part.partition("=")
        if name in weights:
            raise BenchError(f"--mix names {name} twice; give each class once")
        weights[name] = _weight(weight, f"--mix {part!r}")
    return weights


def parse_tenants(text: str) -> dict[Tenant, float]:
    """Weights of tenants, from "a=KEY:3,b=KEY" (weight 1) or "a:3" (without a key). Raises BenchError, which
    never shows a key."""
    tenants: dict[Tenant, float] = {}
    for part in _parts(text):
        head, colon, weight = part.rpartition(":")
        name, _, key = (head if colon else part).partition("=")
        if not name:
            raise BenchError(
                "--tenants: a tenant has no name; use NAME=KEY:WEIGHT, with commas between tenants"
            )
        if any(tenant.name == name for tenant in tenants):
            raise BenchError(f"--tenants names {name} twice; give each tenant once")
        tenants[Tenant(name, key or None)] = _weight(weight, f"--tenants {name}") if colon else 1.0
    return tenants


def draw(what: str, weights: Mapping[str, float], seed: int, index: int) -> str:
    """Draws one of the names; deterministic."""
    generator = random.Random(f"{what}/{seed}/{index}")
    return generator.choices(list(weights), weights=list(weights.values()))[0]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _weight(text: str, where: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise BenchError(f"{where}: the weight is not a number above 0; give one, such as 0.5 or 3")
    return weight
