"""Checks of the status that the processes of a running system report."""

from __future__ import annotations

from collections.abc import Iterator

from tandem_gateway.fleet.load import PodLoad
from tandem_gateway.fleet.unloaded import FastestPods
from tandem_service.tls import Role

from tandem_cli.doctor.finding import Finding, Severity
from tandem_cli.doctor.system import Gateway, Lookahead, Pod, System

#: Size of a short request that every SLO class should serve in time.
_PROMPT_TOKENS, _ANSWER_TOKENS = 256, 32
#: Beyond this offset spans of a trace appear to end before they begin; certificates tolerate more.
_CLOCK_LIMIT_S = 0.5


def reachable(system: System) -> Iterator[Finding]:
    """Each process answers, over TLS if credentials were given."""
    everyone: tuple[Gateway | Pod | Lookahead, ...] = (*system.gateways, *system.pods, *system.lookahead)
    for one in everyone:
        if one.error:
            yield Finding(one.where, f"It does not answer: {one.error}.", _reach_remedy(system, one))


def _reach_remedy(system: System, one: Gateway | Pod | Lookahead) -> str:
    is_refused = one.error.startswith(("UNAUTHENTICATED", "PERMISSION_DENIED"))
    if isinstance(one, Gateway):
        if is_refused:
            return "Give a key with --api-key."
        return "Start it, or name it as https://HOST:PORT (with --ca) if it uses TLS."
    if is_refused:
        return "Give the certificate of a gateway or an operator with --pod-tls-cert, -key and -ca."
    if system.access.tls is None:
        return "Start it, let this machine reach it, or give --pod-tls-cert, -key and -ca if it uses TLS."
    return "Start it, or give it a valid certificate of its role and of the others' CA."


def serving(system: System) -> Iterator[Finding]:
    for pod in system.pods:
        if not pod.error and not pod.is_serving:
            yield Finding(
                pod.where,
                "It answers but does not serve: it loads, drains, or its engine hangs.",
                "Wait, or read its log.",
            )


def used_pods(system: System) -> Iterator[Finding]:
    """Each gateway uses each pod that serves."""
    serving_targets = {pod.target for pod in system.pods if pod.is_serving}
    for gateway in system.answering_gateways:
        if not any(pod.role == Role.DECODE for pod in gateway.fleet.pods):
            yield Finding(
                gateway.where,
                "It knows no decode pod, so it refuses every request.",
                "Correct TANDEM_DECODE, or start a decode pod.",
            )
        for pod in gateway.fleet.pods:
            if not pod.healthy and pod.target in serving_targets:
                yield Finding(
                    gateway.where,
                    f"It does not use {pod.target}, which serves: {pod.cause.rstrip('.') or 'unknown'}.",
                    "Let the gateway reach it, or give both certificates of one CA.",
                )


def revision(system: System) -> Iterator[Finding]:
    """All processes serve the same model revision."""
    found = {
        **{pod.where: (pod.status.model, pod.status.model_revision) for pod in system.pods if not pod.error},
        **{one.where: (one.model.name, one.model.revision) for one in system.answering_gateways},
    }
    if len(set(found.values())) > 1:
        named = ", ".join(f"{where} {name} {digest[:12]}" for where, (name, digest) in sorted(found.items()))
        yield Finding(
            "models",
            f"The processes have different models or revisions ({named}), and a gateway uses only its own.",
            "Pull one revision for all, or run each in a group of its own.",
        )


def kv_layout(system: System) -> Iterator[Finding]:
    """Prefill pods may write into the KV blocks of decode pods."""
    layouts = {
        pod.where: dict(part.strip().partition("=")[::2] for part in pod.status.kv_layout.split(";"))
        for pod in system.of(Role.PREFILL) + system.of(Role.DECODE)
        if pod.status.kv_layout
    }
    differing = {
        name: sorted({layout.get(name, "absent") for layout in layouts.values()})
        for name in {name for layout in layouts.values() for name in layout} - {"model_revision"}
        if len({layout.get(name, "absent") for layout in layouts.values()}) > 1
    }
    if differing:
        named = ", ".join(f"{name} {' and '.join(values)}" for name, values in sorted(differing.items()))
        yield Finding(
            ", ".join(sorted(layouts)),
            f"Their KV layouts differ ({named}), so decode pods compute the prompts themselves.",
            "Start all with the same dtype, block size and version.",
        )


def version(system: System) -> Iterator[Finding]:
    versions = {
        **{pod.where: pod.status.version for pod in system.pods if not pod.error},
        **{gateway.where: gateway.fleet.version for gateway in system.answering_gateways},
    }
    if len(set(versions.values())) > 1:
        named = ", ".join(f"{where} {one or 'unknown'}" for where, one in sorted(versions.items()))
        yield Finding(
            "versions",
            f"The processes run different versions ({named}).",
            "Finish the rollout; two neighbouring versions work together.",
            Severity.WARNING,
        )


def clocks(system: System) -> Iterator[Finding]:
    answered: tuple[Pod | Gateway, ...] = (*system.pods, *system.gateways)
    for one in answered:
        if one.clock is not None and abs(one.clock.ahead_s) > _CLOCK_LIMIT_S + one.clock.uncertainty_s:
            side = "ahead of" if one.clock.ahead_s > 0 else "behind"
            yield Finding(
                one.where,
                f"Its clock is {abs(one.clock.ahead_s):.1f} s {side} this machine's, but certificates and "
                "traces need equal clocks.",
                "Synchronise the clocks of both machines (NTP).",
                Severity.WARNING,
            )


def objectives(system: System) -> Iterator[Finding]:
    """The fastest pods can meet each objective on an idle system."""
    decode = [PodLoad.of(pod.status) for pod in system.of(Role.DECODE)]
    prefill = [PodLoad.of(pod.status) for pod in system.of(Role.PREFILL)] or decode
    decode = [load for load in decode if load.knows_texts]
    prefill = [load for load in prefill if load.knows_prompts]
    if not decode or not prefill:
        return
    fastest = FastestPods(prefill, decode)
    prompt_s = fastest.prompt_s(_PROMPT_TOKENS)
    token_s = fastest.token_s(_PROMPT_TOKENS)
    answer_s = fastest.end_s(_ANSWER_TOKENS, _PROMPT_TOKENS)
    prompt = f"a prompt of {_PROMPT_TOKENS} tokens"
    for gateway in system.answering_gateways:
        for slo in gateway.slo_classes:
            for name, limit_s, seconds, what in (
                ("TTFT", slo.ttft_s, prompt_s, prompt),
                ("TPOT", slo.tpot_s, token_s, "a token"),
                ("E2E", slo.e2e_s, answer_s, f"an answer of {_ANSWER_TOKENS} tokens to {prompt}"),
            ):
                if limit_s and seconds > limit_s:
                    effect = "refuses such requests" if slo.is_strict else "widens the objective"
                    yield Finding(
                        f"{gateway.where}, SLO class {slo.name}",
                        f"No pod can meet {name} {limit_s:g} s even without load: {what} takes {seconds:.3g} "
                        f"s, so the gateway {effect}.",
                        f"Set {name} to {1.2 * seconds:.2g} s in --slo-classes-file, or take faster pods.",
                        Severity.ERROR if slo.is_strict else Severity.WARNING,
                    )


def kv_room(system: System) -> Iterator[Finding]:
    """Every pod has room for the longest text that a gateway admits."""
    for gateway in system.answering_gateways:
        longest = gateway.model.max_model_len
        for pod in system.of(Role.DECODE) + system.of(Role.PREFILL):
            blocks = pod.status.usage.blocks_total * pod.status.block_size
            room = min(blocks, pod.status.max_model_len)
            if room < longest:
                limit = "blocks" if room == blocks else "--max-model-len"
                yield Finding(
                    pod.where,
                    f"It holds a text of {room} tokens ({limit}), while {gateway.where} admits {longest}.",
                    f"Give the pod more --num-blocks, or the gateway --max-model-len {room}.",
                )


def invariants(system: System) -> Iterator[Finding]:
    for pod in system.pods:
        for violation in pod.status.usage.violations:
            yield Finding(
                pod.where,
                f"Its own check found a broken invariant: {violation.rstrip('.')}.",
                "Restart it, and report it with its log.",
            )


def lookahead_redis(system: System) -> Iterator[Finding]:
    for one in system.lookahead:
        if not one.error and not one.status.redis_connected:
            yield Finding(
                one.where,
                "It does not reach Redis, so it shares text with its own pods only and does not keep it.",
                "Start Redis, or correct --redis-url.",
            )


SYSTEM_CHECKS = (
    reachable,
    serving,
    used_pods,
    revision,
    kv_layout,
    version,
    clocks,
    objectives,
    kv_room,
    invariants,
    lookahead_redis,
)
