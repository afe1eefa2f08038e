"""Which SLO classes this machine can keep without load, from the costs of steps that its pods report."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio
from tandem_core.slo import SLO_CLASSES, SloTarget
from tandem_gateway.pod_load import PodLoad
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tandem_service.channels import open_channel
from tandem_service.tls import PodTls, Role

from tandem_cli.supervisor import ProcessSpec

_TIMEOUT_S = 2.0
#: Length of the answer for which the end is predicted.
_NUM_OUTPUT = 128
_EXAMPLES = (256, 4096)


async def lines(specs: Sequence[ProcessSpec], tls: PodTls | None = None) -> list[str]:
    """Sentences for the terminal; none if a pod does not answer or says nothing of its costs."""
    try:
        reports = {
            spec.role: await _report(spec, tls) for spec in specs if spec.role in ("decode", "prefill")
        }
    except (grpc.aio.AioRpcError, TimeoutError):
        return []
    if "decode" not in reports:
        return []
    decode = PodLoad.of(reports["decode"])
    prefill = PodLoad.of(reports.get("prefill", reports["decode"]))
    longest = reports["decode"].max_model_len - _NUM_OUTPUT
    if not (decode.decode_cost.is_known and prefill.prefill_cost.is_known and longest > 0):
        return []
    return _sentences(Reach(prefill, decode), longest)


async def _report(spec: ProcessSpec, tls: PodTls | None) -> common_pb2.PodStatus:
    channel = open_channel(spec.health_target, tls, Role(spec.role) if tls is not None else None)
    try:
        if spec.role == "decode":
            decode = decode_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[no-untyped-call]
            request = decode_pb2.GetDecodeStatusRequest()
            answer: decode_pb2.GetDecodeStatusResponse
            answer = await decode.GetDecodeStatus(request, timeout=_TIMEOUT_S)
            return answer.status
        prefill = prefill_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[no-untyped-call]
        other = prefill_pb2.GetPrefillStatusRequest()
        reply: prefill_pb2.GetPrefillStatusResponse
        reply = await prefill.GetPrefillStatus(other, timeout=_TIMEOUT_S)
        return reply.status
    finally:
        await channel.close(None)


class Reach:
    """Times of one request that has the machine for itself."""

    def __init__(self, prefill: PodLoad, decode: PodLoad) -> None:
        self._prefill, self._decode = prefill, decode

    def ttft_s(self, num_prompt: int) -> float:
        return self._prefill.prompt_seconds(0, num_prompt) * self._prefill.prefill_cost.unloaded

    def token_s(self, num_prompt: int) -> float:
        return self._decode.token_seconds(1, num_prompt) * self._decode.decode_cost.unloaded

    def meets(self, slo: SloTarget, num_prompt: int) -> bool:
        ttft_s, token_s = self.ttft_s(num_prompt), self.token_s(num_prompt)
        return not slo.miss(ttft_s, token_s, ttft_s + _NUM_OUTPUT * token_s)

    def longest_prompt(self, slo: SloTarget, limit: int) -> int:
        """The longest prompt, up to the limit, with which the objectives are met; 0: none."""
        good, bad = 0, limit + 1
        while bad - good > 1:
            middle = (good + bad) // 2
            if self.meets(slo, middle):
                good = middle
            else:
                bad = middle
        return good


def _sentences(reach: Reach, longest: int) -> list[str]:
    examples = [length for length in _EXAMPLES if length <= longest]
    found = [
        "Without load, about: "
        + ", ".join(
            f"{reach.ttft_s(length):.2g} s to the first token of a {length:,}-token prompt"
            for length in examples
        )
        + f"; {reach.token_s(min(longest, _EXAMPLES[0])) * 1000:.0f} ms per token."
    ]
    for slo in SLO_CLASSES.values():
        kept = reach.longest_prompt(slo, longest)
        if kept < longest and slo != SloTarget(slo.name):
            upto = f"for prompts of up to {kept:,} tokens" if kept else "for no prompt"
            found.append(
                f"SLO class {slo.name} can be kept {upto} ({_NUM_OUTPUT} tokens of answer); objectives of "
                "others are widened (--set gateway.slo-slack=N)."
            )
    return found
