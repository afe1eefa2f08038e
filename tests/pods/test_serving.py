"""The life of a pod's process."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: A pod whose engine has been in one step for argv[1] seconds.
POD = """
import asyncio, sys
from tandem_pod.serving import serving
from tandem_proto.v1 import common_pb2
from tandem_service.server import PodServer
from tandem_service.settings import PodSettings

async def main():
    settings = PodSettings(port=0, drain_s=0.0, pod_id="p")
    server = PodServer(settings, role="decode", service_names=[], status_codes={})
    shown = asyncio.Event()

    async def status():
        return common_pb2.PodStatus(age_seconds=float(sys.argv[1]))

    async with serving(server, status, lambda newest: shown.set()):
        await shown.wait()

asyncio.run(main())
"""


@pytest.mark.parametrize(("age_s", "code", "words"), [(119, 0, ""), (121, 70, "the engine hangs")])
def test_a_pod_whose_engine_hangs_ends_itself(age_s: int, code: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", POD, str(age_s)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
