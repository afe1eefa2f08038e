"""A receipt in words, for people at a terminal."""

from __future__ import annotations

from tandem_proto.v1 import common_pb2

_NS_PER_MS = 1e6
_NS_PER_S = 1e9


def describe_receipt(receipt: common_pb2.Receipt) -> str:
    """Three lines: the times, the tokens and where they came from, the SLO."""
    steps = receipt.decode_steps
    per_step = f", {(receipt.output_tokens - 1) / steps:.2f} per step" if steps else ""
    sources = ", ".join(f"{name} {count}" for name, count in sorted(receipt.accepted_by_source.items()))
    pods = " -> ".join(pod for pod in (receipt.prefill_pod, receipt.decode_pod) if pod)
    slo = f"SLO {receipt.slo.name}: " if receipt.slo.name else "SLO: "
    slo += "met" if receipt.slo_met else f"missed ({receipt.slo_miss_reason or 'no reason given'})"
    retries = f", {receipt.prefill_retries} prefill retries" if receipt.prefill_retries else ""
    return "\n".join(
        (
            f"TTFT {receipt.ttft_ns / _NS_PER_S:.3f} s, E2E {receipt.e2e_ns / _NS_PER_S:.3f} s"
            f"; queue {receipt.queue_ns / _NS_PER_MS:.0f} + prefill {receipt.prefill_ns / _NS_PER_MS:.0f}"
            f" + transfer {receipt.transfer_ns / _NS_PER_MS:.0f}"
            f" + decode {receipt.decode_ns / _NS_PER_MS:.0f} ms; {pods}{retries}",
            f"prompt {receipt.prompt_tokens} tokens ({receipt.cached_tokens} cached), output"
            f" {receipt.output_tokens} in {steps} steps{per_step};"
            f" drafted {receipt.drafted_tokens}, accepted {receipt.accepted_tokens}"
            + (f" ({sources})" if sources else ""),
            f"{slo}; seed {receipt.seed}",
        )
    )
