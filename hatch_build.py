"""hatchling's build hook: compiles the C++ parts when a wheel is built or the package installed."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeLibraries(BuildHookInterface[Any]):
    """Runs build_native.py."""

    def dependencies(self) -> list[str]:
        """A compiler from PyPI where the machine has none."""
        return [] if self._script()["system_compiler"]() else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Puts the libraries into the wheel and tags it with this platform."""
        root = Path(self.root)
        libraries = self._script()["build"]()
        build_data["artifacts"].extend(str(path.relative_to(root)) for path in libraries)
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def _script(self) -> dict[str, Any]:
        return runpy.run_path(str(Path(self.root) / "build_native.py"))
