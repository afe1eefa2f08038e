"""The life of a pod's process."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: A pod whose engine's thread is busy for argv[1] seconds.
POD = """
import asyncio, sys, time
from tandem_engine.loop import EngineLoop
from tandem_pod import engine_watch
from tandem_pod.serving import running, serving
from tandem_proto.v1 import common_pb2
from tandem_service.server import PodServer
from tandem_service.settings import PodSettings

engine_watch._EXIT_AFTER_S = 0.5

class Idle:
    num_steps = 0

    def has_work(self):
        return False

    def work_done(self):
        return 0

    def step(self):
        return []

    def snapshot(self):
        return None

    def check(self):
        return None

    def rest(self):
        return None

async def main():
    settings = PodSettings(port=0, drain_s=0.0, pod_id="p")
    server = PodServer(settings, role="decode", service_names=[], status_codes={})
    loop = EngineLoop(Idle())

    def status():
        return common_pb2.PodStatus()

    async with running(loop), serving(server, status, lambda newest: None, loop, counts_work=True):
        await loop.call_async(lambda: time.sleep(float(sys.argv[1])))

asyncio.run(main())
"""


@pytest.mark.parametrize(("busy_s", "code", "words"), [(0.3, 0, ""), (60, 70, "the engine hangs")])
def test_a_pod_whose_engine_hangs_ends_itself(busy_s: float, code: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", POD, str(busy_s)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
