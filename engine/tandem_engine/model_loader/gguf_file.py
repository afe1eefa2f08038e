"""A GGUF file's header: its keys, and where its tensors lie. Every number is checked before it is used.

Our own reader, because the gguf package's follows counts and lengths unchecked: a damaged one makes it fill
the memory. Strings inside arrays (vocabularies) are decoded only on demand.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from tandem_core.errors import ModelLoadError

#: GGUF's value types that are plain numbers -> struct's letter.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
#: Far beyond any vocabulary; a damaged count above it would cost minutes.
_MOST_ELEMENTS = 1 << 24
_MOST_DIMENSIONS = 4


class GgufTensor(NamedTuple):
    name: str
    kind: GGMLQuantizationType
    #: In torch's order, outermost first.
    shape: tuple[int, ...]
    #: [rows, bytes of a row] uint8, mapped.
    rows: NDArray[np.uint8]


class _Array(NamedTuple):
    kind: int
    length: int
    start: int


class GgufFile:
    """One file, mapped. Raises ModelLoadError for anything that is not a whole GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
        except FileNotFoundError:
            raise ModelLoadError(f"{path} does not exist; pull the model again") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelLoadError(f"{path} is not a whole GGUF file ({error}); download it again") from error
        self._view, self._at = memoryview(self._data), 0  # type: ignore[arg-type]
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read()
        except struct.error:
            self._fail("its header is cut off")
        except UnicodeDecodeError:
            self._fail("a name in its header is no text")

    def _fail(self, reason: str) -> NoReturn:
        raise ModelLoadError(f"{self.path} is not a whole GGUF file ({reason}); download it again")

    def _read(self) -> None:
        if bytes(self._view[:4]) != b"GGUF":
            self._fail("it does not start with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            self._fail(f"its version is {version}, readable are {_VERSIONS[0]} and {_VERSIONS[1]}")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        for _ in range(num_fields):
            key = self._string()
            if key in self.fields:
                self._fail(f"the key {key} is there twice")
            self.fields[key] = self._value(self._number("I"))
        found = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        end = 0
        for offset, name, kind, shape in sorted(found):
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                self._fail(f"{name} has rows of {shape[-1]} values, {kind.name} wants a multiple of {block}")
            row_bytes = shape[-1] // block * block_bytes
            size = row_bytes
            for dimension in shape[:-1]:
                size *= dimension
            if offset % alignment or offset < end:
                self._fail(f"{name} overlaps another tensor or is not aligned")
            if name in self.tensors:
                self._fail(f"{name} is there twice")
            if start + offset + size > len(self._data):
                self._fail(f"it ends before {name} does")
            end = offset + size
            rows = self._data[start + offset : start + end].reshape(-1, row_bytes)
            self.tensors[name] = GgufTensor(name, kind, shape, rows)

    def _tensor_info(self) -> tuple[int, str, GGMLQuantizationType, tuple[int, ...]]:
        name, num_dimensions = self._string(), self._number("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            self._fail(f"{name} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        if 0 in shape:
            self._fail(f"{name} is empty")
        number = self._number("I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelLoadError(
                f"{self.path} holds {name} in format {number}, which is unknown here; use another file of "
                "the model"
            ) from None
        return self._number("Q"), name, kind, shape

    def _number(self, letter: str) -> Any:
        (value,) = struct.unpack_from(f"<{letter}", self._view, self._at)
        self._at += struct.calcsize(letter)
        return value

    def _string(self) -> str:
        return bytes(self._bytes(self._number("Q"))).decode()

    def _bytes(self, count: int) -> memoryview:
        if count > len(self._view) - self._at:
            self._fail("its header is cut off")
        self._at += count
        return self._view[self._at - count : self._at]

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            self._fail(f"a value has type {kind}, which does not exist")
        item, count = self._number("I"), self._number("Q")
        array = _Array(item, count, self._at)
        if count > _MOST_ELEMENTS:
            self._fail(f"an array has {count} elements")
        if item in _NUMBERS:
            self._bytes(count * struct.calcsize(_NUMBERS[item]))
        elif item == _STRING:
            for _ in range(count):
                self._bytes(self._number("Q"))
        else:
            self._fail(f"an array has elements of type {item}")
        return array

    def array(self, key: str) -> list[Any]:
        """An array's elements; [] where the key is missing or no array."""
        array = self.fields.get(key)
        if not isinstance(array, _Array):
            return []
        if array.kind in _NUMBERS:
            return list(struct.unpack_from(f"<{array.length}{_NUMBERS[array.kind]}", self._view, array.start))
        self._at = array.start
        return [bytes(self._bytes(self._number("Q"))).decode(errors="replace") for _ in range(array.length)]

    def release(self) -> None:
        """Gives back the memory of what has been read; reading it again maps it again."""
        self._data._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def open_all(path: Path) -> list[GgufFile]:
    """The file, or all files of a split model in order, of which path is any. Raises ModelLoadError."""
    file = GgufFile(path)
    count = file.fields.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [file]
    named = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if named is None or int(named[2]) != count:
        raise ModelLoadError(
            f"{path} is one of {count} parts of a model; name the parts NAME-00001-of-{count:05}.gguf and so "
            "on, in one folder"
        )
    paths = [path.with_name(f"{named[1]}-{n:05}-of-{named[2]}.gguf") for n in range(1, count + 1)]
    if missing := [part.name for part in paths if not part.is_file()]:
        raise ModelLoadError(
            f"{missing[0]} is missing next to {path}; download all {count} parts into one folder"
        )
    files = [file if part == path else GgufFile(part) for part in paths]
    wrong = next((n for n, f in enumerate(files) if f.fields.get("split.no") != n), None)
    if wrong is not None or any(f.fields.get("split.count") != count for f in files):
        raise ModelLoadError(f"{files[wrong or 0].path} is a part of another model; download the parts again")
    return files
