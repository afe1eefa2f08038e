"""Codes of 4 bits as floating-point numbers (e2m1), in two formats of the OCP and of NVIDIA.

MXFP4   a power of two (e8m0) for 32 neighbours
NVFP4   a float8 (e4m3) for 16 neighbours, over one float32 for the tensor
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_engine.model_loader.stored import Grid, Lut

#: Values of the codes.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4 = Grid("MXFP4", Lut, 4, 32, table=E2M1)
NVFP4 = Grid("NVFP4", Lut, 4, 16, table=E2M1)


def lut(codes: Tensor, scales: Tensor) -> Lut:
    return Lut(codes, torch.tensor(E2M1), scales)


def powers_of_two(exponents: Tensor) -> Tensor:
    """e8m0 as uint8 -> float32; 255 is no number."""
    exponents = exponents.to(torch.int32)
    return torch.where(exponents == 255, torch.nan, torch.ldexp(torch.ones(exponents.shape), exponents - 127))
