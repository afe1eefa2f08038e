"""Tandem as users run it: `tandem up`, spoken to over gRPC through the gateway.

python -m peers.tandem FOLDER --speculation global [--up=FLAGS]
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from tandem_cli.fleet import FleetOptions, PortInUseError, check_ports, plan_fleet
from tandem_cli.state_file import read_state
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from peers import streams
from peers.protocol import serve, take_stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--speculation", required=True)
    parser.add_argument("--up", default="", help="further flags of `tandem up`, as a shell would read them")
    options = parser.parse_args()
    replies = take_stdout()
    # A terminated worker ends its fleet too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with _fleet(options) as target, grpc.insecure_channel(target) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        def open_stream(prompt: list[int], max_tokens: int) -> Generator[int, None, int]:
            return _generate(stub, prompt, max_tokens)

        serve(
            f"gateway, prefill and decode pod, lookahead; {options.up or 'default numerics'}",
            lambda job: streams.run(open_stream, job),
            replies,
        )


@contextmanager
def _fleet(options: argparse.Namespace) -> Iterator[str]:
    """Yields the gateway's gRPC target. Raises RuntimeError with the log when the fleet does not come up."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "fleet.log").open("wb") as log:
        state = Path(folder, "fleet.json")
        first = _first_free_port(options.model)
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("tandem")), "up", "--model", str(options.model),
                "--speculation", options.speculation, "--state-file", str(state),
                "--grpc-port", str(first), "--http-port", str(first + 1), "--base-port", str(first + 100),
                *shlex.split(options.up),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"TANDEM_HOME": folder},
        )  # fmt: skip
        try:
            while not (state.exists() and read_state(state).ready):
                if process.poll() is not None:
                    raise RuntimeError(f"tandem up ended: {Path(log.name).read_text().strip()}")
                time.sleep(0.2)
            yield f"127.0.0.1:{first}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _first_free_port(model_dir: Path) -> int:
    """Where a fleet finds all its ports free: its gateway's two, and from 100 above the other pods'."""
    # A step wider than a fleet's ports of one kind, so that fleets do not meet.
    for first in range(20600, 31000, 430):
        plan = plan_fleet(
            FleetOptions(model_dir, grpc_port=first, http_port=first + 1, base_port=first + 100)
        )
        try:
            check_ports(plan, "127.0.0.1")
        except PortInUseError:
            continue
        return first
    raise RuntimeError("no range of ports between 20600 and 31000 is free")


def _generate(
    stub: gateway_pb2_grpc.GatewayServiceStub, prompt: list[int], max_tokens: int
) -> Generator[int, None, int]:
    call = stub.Generate(
        gateway_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            slo_class="batch",
        ),
        timeout=600,
    )
    decode_steps = 0
    try:
        for response in call:
            if response.chunk.token_ids:
                yield len(response.chunk.token_ids)
            if response.HasField("end"):
                decode_steps = response.end.receipt.decode_steps
        return decode_steps
    finally:
        call.cancel()


if __name__ == "__main__":
    main()
