"""Who takes part: names, commands and environments of the peers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_core.model.manifest import ModelManifest
from tandem_engine import model_loader

from peers import environments
from peers.environments import Environment, PeerUnavailableError, cache_home
from peers.worker import Worker


@dataclass(frozen=True)
class Peer:
    """One line of the tables. `environment` None is Tandem's own."""

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: Environment | None = None
    drafts: bool = False
    #: Serves requests that arrive while others run.
    concurrent: bool = True
    pausable: bool = True

    def start(self) -> Worker:
        """Raises PeerUnavailableError."""
        python = Path(sys.executable) if self.environment is None else environments.ensure(self.environment)
        arguments, environ = list(self.arguments), dict[str, str]()
        if self.environment is environments.VLLM:
            arguments = [str(huggingface_folder()), *arguments]
            environ = _vllm_environ(python)
        # -P: with the working directory importable, kernels/ would be taken for another package.
        command = [str(python), "-P", "-m", f"peers.{self.module}", *arguments]
        log = cache_home() / "logs" / f"{self.name.replace(' ', '-').replace(',', '')}.log"
        return Worker(command, environ=environ, log=log, pausable=self.pausable)


def lineup(model_dir: Path, dtype: str, fleets: Sequence[str]) -> list[Peer]:
    """All peers; `fleets` holds the flags of `tandem up` for each pair of fleets, without and with drafts."""
    gguf = str(model_dir / ModelManifest.read(model_dir).weights)
    peers = [
        Peer("transformers", "transformers", (gguf, "--dtype", dtype), concurrent=False),
        Peer("transformers, prompt lookup", "transformers", (gguf, "--dtype", dtype, "--drafts"),
             drafts=True, concurrent=False),
        Peer("llama.cpp", "llama_cpp", (gguf,), environments.LLAMA_CPP),
        Peer("llama.cpp, n-gram drafts", "llama_cpp", (gguf, "--drafts"), environments.LLAMA_CPP,
             drafts=True),
        Peer("vLLM", "vllm", (), environments.VLLM),
        Peer("vLLM, n-gram drafts", "vllm", ("--drafts",), environments.VLLM, drafts=True),
    ]  # fmt: skip
    for flags in fleets:
        label = "tandem" if len(fleets) == 1 else f"tandem {flags}"
        peers += [
            Peer(
                f"{label}, speculation {speculation}",
                "tandem",
                (str(model_dir), "--speculation", speculation, f"--up={flags}"),
                drafts=speculation != "off",
                pausable=False,
            )
            for speculation in ("off", "global")
        ]
    return peers


def huggingface_folder() -> Path:
    """The default model as bfloat16 safetensors in Hugging Face's layout, which is what vLLM reads."""
    model_dir = model_loader.pull(model_loader.DEFAULT_MODEL)
    manifest = ModelManifest.read(model_dir)
    folder = cache_home() / "models" / manifest.revision
    if (folder / "config.json").exists():
        return folder
    export = (
        "import sys, torch; from pathlib import Path; from peers.transformers import load;"
        "load(Path(sys.argv[1]), torch.bfloat16).save_pretrained(sys.argv[2])"
    )
    # In a process of its own: the driver has no use for torch, whose threads would wait beside the peers.
    done = subprocess.run(
        [sys.executable, "-P", "-c", export, str(model_dir / manifest.weights), str(folder)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise PeerUnavailableError(
            f"the model cannot be converted: {done.stderr.strip().rpartition(chr(10))[2]}"
        )
    return folder


def _vllm_environ(python: Path) -> dict[str, str]:
    """vLLM's documentation asks for Intel's OpenMP, which its wheel brings, to be preloaded.

    By itself it computes on all cores but one, which of two is half; here on all, as everyone else, unless
    VLLM_CPU_NUM_OF_RESERVED_CPU says how many to leave free. Its ahead-of-time compilation is off: version
    0.32.0 cannot load again what it saved, and compiles at each start, for two minutes.
    """
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return {
        "VLLM_CACHE_ROOT": str(cache_home() / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
        "VLLM_USE_AOT_COMPILE": "0",
        "HF_HUB_OFFLINE": "1",
    } | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})
