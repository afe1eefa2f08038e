"""Measures this machine's peak rates of reading and of matrix products, and the state of its AMX units.

All cores work at once, in torch. On some hosts with AMX the units of a core run at one of two speeds for
seconds at a time, so results pages have a column AMX before and after what they measure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from timeit import repeat

import torch
import torch.nn.functional as F
from tandem_engine.models.linear import cpu_has_bf16

#: Rows, columns and depth of the products that show the peak, and of those that show the state of AMX.
_PEAK_SIZE, _PROBE_SIZE = 2048, 1024
_PROBES = 30
#: Multiply-adds of one TDPBF16PS: 16 rows, 16 columns, 32 of depth.
_TILE_PRODUCTS = 16 * 16 * 32

#: Heading of the column with the state of the AMX units, and what it means.
AMX = "AMX, ns per tile"
AMX_NOTE = (
    f"{AMX}: a core's time for 16 x 16 x 32 multiply-adds in F.linear on bfloat16, before / after the row "
    "was measured: 6 to 10 in the fast state, about 24 in the slow one."
)


@dataclass(frozen=True)
class Peaks:
    read_bytes_per_s: float
    #: Operations per second, two for a multiply-add, by the type of both operands.
    ops_per_s: Mapping[torch.dtype, float]

    def fastest(self, dtype: torch.dtype) -> float:
        """Operations per second of the fastest product whose operands hold values of this type.

        A machine without instructions for a type can convert it to a wider one.
        """
        return max(speed for wider, speed in self.ops_per_s.items() if wider.itemsize >= dtype.itemsize)

    def best(self, other: Peaks) -> Peaks:
        """The higher figure of two measurements on one machine."""
        ops_per_s = {dtype: max(speed, other.ops_per_s[dtype]) for dtype, speed in self.ops_per_s.items()}
        return Peaks(max(self.read_bytes_per_s, other.read_bytes_per_s), ops_per_s)

    def __str__(self) -> str:
        speeds = ", ".join(
            f"{speed / 1e9:.0f} in {str(dtype).removeprefix('torch.')}"
            for dtype, speed in self.ops_per_s.items()
        )
        return f"reads {self.read_bytes_per_s / 1e9:.1f} GB/s and multiplies at {speeds} (10^9 operations/s)"


def measure_peaks() -> Peaks:
    """The best of five sums of 512 MiB, and of five products in each type with instructions of its own."""
    large = torch.ones(1 << 27)
    dtypes = [torch.float32]
    if cpu_has_bf16():
        dtypes.append(torch.bfloat16)
    # Without these instructions torch's product of integers is a plain loop.
    if torch.cpu._is_vnni_supported():
        dtypes.append(torch.int8)
    products = {dtype: min(repeat(_product(dtype, _PEAK_SIZE), number=1)) for dtype in dtypes}
    return Peaks(
        large.nbytes / min(repeat(large.sum, number=1)),
        {dtype: 2 * _PEAK_SIZE**3 / seconds for dtype, seconds in products.items()},
    )


def amx_tile_ns() -> float | None:
    """Time of one core for 16 x 16 x 32 multiply-adds in F.linear on bfloat16, in nanoseconds; None without
    AMX. One AMX instruction does this work. Takes the median of some tens of milliseconds.
    """
    if not torch.cpu._is_amx_tile_supported():
        return None
    product = _product(torch.bfloat16, _PROBE_SIZE)
    product()
    return tile_ns(median(repeat(product, number=1, repeat=_PROBES)), torch.get_num_threads())


def tile_ns(seconds: float, num_threads: int) -> float:
    """The same, from the time of one product of the probe's size."""
    return 1e9 * seconds * num_threads * _TILE_PRODUCTS / _PROBE_SIZE**3


def amx_cell(before: float | None, after: float | None) -> str:
    """A cell of the column AMX; "" without AMX."""
    return "" if before is None or after is None else f"{before:.1f} / {after:.1f}"


def _product(dtype: torch.dtype, size: int) -> Callable[[], torch.Tensor]:
    a, b = (100 * torch.rand(2, size, size)).to(dtype)
    return (lambda: torch._int_mm(a, b.t())) if dtype == torch.int8 else (lambda: F.linear(a, b))
