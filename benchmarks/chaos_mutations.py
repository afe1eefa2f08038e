"""Removes one guard at a time from a copy of the source, and asks who finds it.

    python benchmarks/chaos_mutations.py [--out TABLE.md] [--only WORD]

A guard that nobody misses is no guard, or the harness is blind. `tandem chaos` has to find those that it
can see, the test that is named here the others. Prints a table;
exit code 1 if nothing shows that a guard is gone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_SOURCES = ("proto", "core", "kernels", "engine", "drafting", "services")
_IMPORT_ROOTS = (*_SOURCES[:-1], *(f"services/{name}" for name in
                 ("common", "pod", "gateway", "prefill", "decode", "lookahead", "cli")))  # fmt: skip
_LIMIT_S = 900.0

_INCOMING = "engine/tandem_engine/transport/incoming.py"
_OUTGOING = "engine/tandem_engine/transport/outgoing.py"
_ZEROMQ = "engine/tandem_engine/transport/zeromq.py"
_RELAY = "services/gateway/tandem_gateway/relay.py"
_FLEET = "services/gateway/tandem_gateway/fleet.py"
_HANDOFF = "services/decode/tandem_decode/handoff.py"
_STREAM = "services/decode/tandem_decode/prefill_stream.py"
_DECODE = "services/decode/tandem_decode/servicer.py"
_PREFILL = "services/prefill/tandem_prefill/servicer.py"


def _simulated(*kinds: str) -> tuple[str, ...]:
    return ("chaos", "--seed", "1", "--simulated", "4000", "--kinds", ",".join(kinds))


def _frames(*kinds: str) -> tuple[str, ...]:
    return ("chaos", "--seed", "1", "--frames", "1500", "--settle-s", "10", "--kinds", ",".join(kinds))


def _processes(kinds: str, roles: str, faults: int = 6) -> tuple[str, ...]:
    small = ("--faults", str(faults), "--cases", "6", "--contexts", "60,500", "--concurrency", "4")
    return ("chaos", "--seed", "1", *small, "--settle-s", "10", "--kinds", kinds, "--roles", roles)


def _test(node: str) -> tuple[str, ...]:
    return ("pytest", node)


@dataclass(frozen=True)
class Mutation:
    guard: str
    file: str
    old: str
    new: str
    finder: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "digest of a frame",
        _INCOMING,
        "if not secrets.compare_digest(expected, frame.digest):",
        "if False:",
        _simulated("corrupt"),
    ),
    Mutation(
        "epoch of a frame",
        _INCOMING,
        "if frame.epoch != self._ticket.epoch:",
        "if False:",
        _simulated("stale"),
    ),
    Mutation(
        "a frame is written once",
        _INCOMING,
        "if self._seen[frame.layer, rows].any():",
        "if False:",
        _simulated("duplicate"),
    ),
    Mutation(
        "an unknown transfer is refused",
        _INCOMING,
        'raise Dropped(DropCause.UNKNOWN, "no such transfer is open")',
        "transfer = next(iter(self._transfers.values()))",
        _simulated("forge", "stale"),
    ),
    Mutation(
        "a retry writes no complete block",
        _INCOMING,
        "            or not self._wanted[first : last + 1].all()\n",
        "",
        _test("tests/engine/test_transport_receiver.py::test_a_retry_cannot_write_a_block_that_is_complete"),
    ),
    Mutation(
        "length of a frame",
        _INCOMING,
        "if payload.nbytes != frame.num_blocks * self._layout.block_bytes:",
        "if False:",
        _test(
            "tests/engine/test_transport_receiver.py::test_a_frame_out_of_place_is_dropped_counted_and_rejected"
        ),
    ),
    Mutation(
        "no write after an abort",
        _INCOMING,
        "if self._state.is_final or self._is_failing:",
        "if False:",
        _test(
            "tests/engine/test_transport_receiver.py::"
            "test_a_frame_looked_up_before_abort_but_accepted_after_it_is_not_written"
        ),
    ),
    Mutation(
        "byte credit",
        _OUTGOING,
        "if self._in_flight_bytes + num_bytes > self._ticket.credit_bytes:",
        "if False:",
        _test(
            "tests/engine/test_transport_receiver.py::"
            "test_the_sender_sends_exactly_its_credit_and_goes_on_as_credit_returns"
        ),
    ),
    Mutation(
        "layout of the KV",
        "engine/tandem_engine/transport/layout.py",
        "if other_fingerprint == self.fingerprint:",
        "if True:",
        _test("tests/engine/test_transport.py::test_unequal_layouts_refuse_at_the_ticket"),
    ),
    Mutation(
        "lease: the receiver's credit",
        _ZEROMQ,
        "if transfer.stalled_for_s() > self._options.stall_s:",
        "if False:",
        _test(
            "tests/engine/test_transport_receiver.py::"
            "test_a_peer_that_goes_silent_fails_the_transfer_after_the_stall_time"
        ),
    ),
    Mutation(
        "lease: heartbeats of the prefill pod",
        _STREAM,
        "if not self._reading.done() and now - self._heard_at > limits.heartbeat_s:",
        "if False:",
        _test(
            "tests/decode/test_prefill_stream.py::"
            "test_a_pod_without_heartbeats_is_left_as_crashed_if_it_had_answered"
        ),
    ),
    Mutation(
        "lease: frames that are owed",
        _STREAM,
        "elif now - self._frame_at > limits.frame_s:",
        "elif False:",
        _test(
            "tests/decode/test_prefill_stream.py::"
            "test_frames_that_were_sent_and_do_not_arrive_end_the_attempt_before_the_first_token"
        ),
    ),
    Mutation(
        "the prefill pod's engine moves on",
        _STREAM,
        "if self._finished is None and now - self._layer_at > limits.engine_s:",
        "if False:",
        _test(
            "tests/decode/test_prefill_stream.py::"
            "test_a_pod_whose_engine_computes_nothing_is_left_in_spite_of_its_heartbeats"
        ),
    ),
    Mutation(
        "a second prefill pod is asked",
        _HANDOFF,
        "                    await attempts.failed(crashed=error.crashed)\n",
        "                    raise\n",
        _frames("drop", "corrupt"),
    ),
    Mutation(
        "blocks that did not arrive are computed",
        _HANDOFF,
        "while count < len(reservation.block_ids) and (count not in wanted or count in done):",
        "while count < len(reservation.block_ids):",
        _frames("drop"),
    ),
    Mutation(
        "the transfer ends with its handoff",
        _HANDOFF,
        "                incoming.abort()\n",
        "                pass\n",
        _frames("drop"),
    ),
    Mutation(
        "the writer's hold is released",
        _HANDOFF,
        "        for hold in holds:\n            self._loop.engine.blocks.release(hold)\n",
        "        pass\n",
        _frames("delay"),
    ),
    Mutation(
        "the writer holds its blocks",
        _HANDOFF,
        "            holds.append(self._loop.engine.blocks.hold(writable))\n",
        "            pass\n",
        _test(
            "tests/decode/test_handoff.py::"
            "test_blocks_of_a_request_that_ends_first_are_not_free_until_the_transfer_has_ended"
        ),
    ),
    Mutation(
        "the reader holds its blocks",
        "services/prefill/tandem_prefill/kv_streaming.py",
        "            stream.holds.append(self._manager.hold(blocks))\n",
        "            pass\n",
        _frames("throttle", "delay"),
    ),
    Mutation(
        "the sender's transfer ends with its call",
        _PREFILL,
        "            transfer.abort()  # does nothing after a finished transfer\n",
        "",
        _frames("corrupt", "drop"),
    ),
    Mutation(
        "a request's blocks go with its call",
        _DECODE,
        "await asyncio.shield(self._loop.call_async(lambda: self._loop.forget(state.request_id)))",
        "pass",
        _test("tests/pods/test_disaggregation.py::test_cancelling_at_any_moment_gives_everything_back"),
    ),
    Mutation(
        "a ticket names its caller's host",
        _PREFILL,
        "        if self._only_to_caller:\n            _check_owner(ticket, context)\n",
        "",
        _test("tests/pods/test_doors.py::test_kv_goes_to_the_callers_host_only"),
    ),
    Mutation(
        "a ticket has a key",
        _ZEROMQ,
        "if not ticket.public_key and self._options.curve:",
        "if False:",
        _test("tests/engine/test_transport_sender.py::test_a_ticket_without_a_key_is_refused"),
    ),
    Mutation(
        "circuit breaker",
        "services/decode/tandem_decode/prefill_client.py",
        "if breaker is None or (now >= breaker.closed_at and not first):",
        "if True:",
        _test(
            "tests/decode/test_prefill_client.py::"
            "test_a_pod_that_failed_comes_last_until_one_request_has_tried_it"
        ),
    ),
    Mutation(
        "crash bound, decode pods",
        _RELAY,
        "if num_crashed >= _MAX_CRASHES:",
        "if False:",
        _test("tests/gateway/test_relay.py::test_a_request_that_kills_two_pods_gets_no_third"),
    ),
    Mutation(
        "crash bound, prefill pods",
        _HANDOFF,
        "if message.crashes + attempts.num_crashed >= _MAX_CRASHES:",
        "if False:",
        _test(
            "tests/pods/test_disaggregation.py::test_the_second_prefill_pod_that_stops_with_a_request_ends_it"
        ),
    ),
    Mutation(
        "silence limit of the relay",
        _RELAY,
        "_SILENCE_LIMIT_S = 1.0",
        "_SILENCE_LIMIT_S = 1000.0",
        _test("tests/gateway/test_relay.py::test_a_pod_that_falls_silent_is_left_within_a_second"),
    ),
    Mutation(
        "ping timeout of gRPC",
        "services/common/tandem_service/channels.py",
        '    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),\n',
        "",
        _test("tests/service/test_channels.py"),
    ),
    Mutation(
        "silence limit and ping timeout",
        _RELAY,
        "_SILENCE_LIMIT_S = 1.0",
        "_SILENCE_LIMIT_S = 1000.0",
        _processes("pause", "decode", faults=20),
    ),
    Mutation(
        "the next pod gets the tokens so far",
        _RELAY,
        "output_token_ids=tokens,",
        "output_token_ids=[],",
        _processes("kill", "decode"),
    ),
    Mutation(
        "token offset at the seam",
        _RELAY,
        "response.chunk.offset == len(tokens)",
        "True",
        _test("tests/gateway/test_relay.py::test_a_pod_that_cannot_continue_sends_no_token_twice"),
    ),
    Mutation(
        "text before the seam is replayed",
        _DECODE,
        "        self._detokenizer.push(request.output_token_ids)\n",
        "",
        _test("tests/pods/test_continuation.py::test_a_stop_string_is_found_across_the_cut"),
    ),
    Mutation(
        "model revision of a pod",
        _FLEET,
        "if revision and revision != self._model_revision:",
        "if False:",
        _test("tests/gateway/test_relay.py::test_a_pod_with_another_model_revision_is_not_used"),
    ),
    Mutation(
        "a lost pod is left",
        _RELAY,
        "                failed |= {route.decode.target}\n",
        "",
        _test(
            "tests/gateway/test_relay.py::"
            "test_a_pod_that_failed_a_request_waits_until_the_others_have_failed_it"
        ),
    ),
    Mutation(
        "a hung process is killed",
        "services/cli/tandem_cli/supervisor.py",
        '        self._on_event(child.spec, f"has not answered for {silent_s:.0f} s: killed")\n'
        "        process.kill()\n",
        "",
        _test("tests/cli/test_supervisor.py::test_a_process_that_falls_silent_is_killed_and_started_again"),
    ),
    Mutation(
        "a draining pod hands over",
        "services/decode/tandem_decode/main.py",
        "    server.hand_over = servicer.hand_over\n",
        "",
        _test("tests/pods/test_drain.py::test_another_pod_takes_over_with_the_kv_of_the_one_that_drains"),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="guards whose name contains this")
    arguments = parser.parse_args()
    rows = ["| guard removed | file | found by | how it shows |", "|---|---|---|---|"]
    num_blind = 0
    for mutation in MUTATIONS:
        if arguments.only not in mutation.guard:
            continue
        found = _try(mutation)
        num_blind += found is None
        rows.append(
            f"| {mutation.guard} | {Path(mutation.file).name} | {_name(mutation.finder)} | "
            f"{found or '**not found**'} |"
        )
        print(rows[-1], flush=True)
    if arguments.out is not None:
        arguments.out.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return min(num_blind, 1)


def _name(finder: tuple[str, ...]) -> str:
    if finder[0] == "pytest":
        return f"`{finder[1].partition('::')[2] or finder[1]}`"
    what = next(option for option in ("--simulated", "--frames", "--faults") if option in finder)
    return f"`tandem chaos {what}`"


def _try(mutation: Mutation) -> str | None:
    """How the removal shows; None: it does not."""
    with tempfile.TemporaryDirectory(prefix="tandem-mutation-") as scratch:
        copy = Path(scratch)
        for folder in (*_SOURCES, "tests", "benchmarks"):
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(_ROOT / folder, copy / folder, ignore=ignored)
        shutil.copy(_ROOT / "pyproject.toml", copy)
        _edit(copy, mutation)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(copy / folder) for folder in _IMPORT_ROOTS)
        }
        finder = mutation.finder
        if finder[0] == "pytest":
            command = [sys.executable, "-P", "-m", "pytest", "-n0", "-q", "-x", "-m", "not wide", finder[1]]
        else:
            command = [sys.executable, "-P", "-m", "tandem_cli.main", *finder]
        is_test = finder[0] == "pytest"
        symptom: str | None = None
        # A test that fails once may have met a busy machine.
        for _ in range(1 + is_test):
            try:
                done = subprocess.run(
                    command,
                    cwd=copy,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=_LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"it does not end within {_LIMIT_S:g} s"
            symptom = _symptom(done, is_test=is_test)
            if symptom is None:
                return None
        return symptom


def _edit(copy: Path, mutation: Mutation) -> None:
    path = copy / mutation.file
    source = path.read_text(encoding="utf-8")
    if mutation.old not in source:
        sys.exit(f"error: {mutation.file} has no {mutation.old!r} any more; update {Path(__file__).name}")
    path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    if mutation.guard == "silence limit and ping timeout":
        channels = copy / "services/common/tandem_service/channels.py"
        line = '    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),\n'
        channels.write_text(channels.read_text(encoding="utf-8").replace(line, ""), encoding="utf-8")


def _symptom(done: subprocess.CompletedProcess[str], *, is_test: bool) -> str | None:
    if is_test:
        if done.returncode == 0:
            return None
        if done.returncode != 1:
            sys.exit(f"error: pytest cannot run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return "it fails"
    lines = [line for line in done.stderr.splitlines() if line.startswith("violation: ")]
    if lines:
        return lines[0].removeprefix("violation: ").replace("|", "\\|")[:160]
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return f"it ends with code {done.returncode}: {last[:120]}"


if __name__ == "__main__":
    sys.exit(main())
