"""A gateway with certificates for its pods."""

import asyncio
import shutil
from pathlib import Path

from tandem_cli.up import certificates
from tandem_cli.up.up_plan import certificate_files
from tandem_service.tls import Role
from waiting import until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def settings(folder: Path, role: Role) -> dict[str, Path]:
    files = certificate_files(folder, role)
    assert files.ca is not None
    return {"pod_tls_cert": files.cert, "pod_tls_key": files.key, "pod_tls_ca": files.ca}


async def test_a_gateway_takes_a_new_ca_while_a_stream_continues(pods, gateway, tmp_path: Path):
    folder = tmp_path / "tls"
    certificates.prepare(folder)
    words = tuple(f" word{index}" for index in range(10))
    pod = await pods(words=words, pause_s=0.2, tls=settings(folder, Role.DECODE))
    front = await gateway(pod, **settings(folder, Role.GATEWAY))
    stream = asyncio.create_task(front.http.post("/v1/chat/completions", json=CHAT))
    await pod.started.wait()

    certificates.prepare(tmp_path / "next")
    shutil.copytree(tmp_path / "next", folder, dirs_exist_ok=True)
    (known,) = front.process.fleet.pods()
    before = known.channel
    await until(lambda: known.channel is not before)
    assert (await stream).json()["choices"][0]["message"]["content"] == "".join(words)

    # The next process of the pod has a certificate of the new CA alone.
    port = pod.server.port
    await pod.stop()
    await until(lambda: not known.healthy)
    await pod.start(port)
    await front.until_healthy(1)
    pod.pause_s = 0.0
    answer = await front.http.post("/v1/chat/completions", json=CHAT)
    assert answer.json()["choices"][0]["message"]["content"] == "".join(words)
