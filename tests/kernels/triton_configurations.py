"""The configurations of the Triton kernel whose resources are checked without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

CAPABILITIES = (80, 90)
HEAD_SIZES = (64, 80, 96, 128, 192, 256)


@dataclass(frozen=True)
class Configuration:
    """What a launch is specialized for; dtypes by their names in Triton."""

    capability: int
    head_size: int = 128
    group_size: int = 4
    #: As `choose_tiles` takes it: with groups of 4, 1, 8 and None make 16, 32 and 64 rows.
    max_new_tokens: int | None = None
    dtype: str = "bf16"
    cache_dtype: str = "bf16"
    block_size: int = 64
    #: "none", "head" or "token".
    scales: str = "none"
    tree: bool = True
    #: Sliding window, soft cap and sinks.
    features: bool = False

    @property
    def name(self) -> str:
        features = ["tree"] * self.tree + ["window+softcap+sinks"] * self.features
        return (
            f"sm_{self.capability} D{self.head_size} group {self.group_size} "
            f"n {self.max_new_tokens or 'any'} {self.dtype}/{self.cache_dtype} blocks {self.block_size} "
            f"scales {self.scales} {' '.join(features)}"
        ).rstrip()


def _all() -> list[Configuration]:
    new_tokens = (1, 8, None)
    configurations = [
        Configuration(capability, head_size, max_new_tokens=n, features=features)
        for capability, head_size, n, features in product(CAPABILITIES, HEAD_SIZES, new_tokens, (False, True))
    ]
    quantized = [("i8", "head"), ("i8", "token"), ("fp8e5", "head"), ("fp8e4nv", "token")]
    for capability, head_size, n, (cache_dtype, scales) in product(
        CAPABILITIES, (64, 128, 256), new_tokens, quantized
    ):
        if capability >= 89 or cache_dtype != "fp8e4nv":  # older GPUs cannot convert it
            configurations.append(
                Configuration(capability, head_size, max_new_tokens=n, cache_dtype=cache_dtype, scales=scales)
            )
    for capability, head_size, n, block_size in product(
        CAPABILITIES, (64, 128), (8, None), (16, 32, 48, 128)
    ):
        configurations.append(Configuration(capability, head_size, max_new_tokens=n, block_size=block_size))
    for capability, group_size, n in product(CAPABILITIES, (1, 3, 8, 32), (1, None)):
        configurations.append(Configuration(capability, group_size=group_size, max_new_tokens=n))
    for capability, head_size in product(CAPABILITIES, HEAD_SIZES):
        configurations.append(
            Configuration(capability, head_size, max_new_tokens=8, dtype="fp16", cache_dtype="fp16")
        )
    for capability, head_size, n in product(CAPABILITIES, (128, 256), new_tokens):
        configurations.append(
            Configuration(
                capability, head_size, max_new_tokens=n, dtype="fp16", cache_dtype="i8", block_size=16,
                scales="token", features=True,
            )
        )  # fmt: skip
    for capability, head_size, n in product(CAPABILITIES, (64, 128, 256), (1, None)):
        configurations.append(Configuration(capability, head_size, max_new_tokens=n, tree=False))
    for capability, head_size, n in product(CAPABILITIES, (64, 128, 256), (1, None)):
        configurations.append(
            Configuration(capability, head_size, max_new_tokens=n, dtype="fp32", cache_dtype="fp32")
        )
    return configurations


#: Every head size, number of rows, dtype, block size and feature, most of them crossed.
ALL = _all()

#: What every test run compiles: each tile size, and each dtype, scale and feature once for the newer GPUs.
SUBSET = [
    *(
        Configuration(capability, head_size, max_new_tokens=n)
        for capability in CAPABILITIES
        for head_size, n in ((64, 1), (128, 8), (128, None), (256, None))
    ),
    Configuration(80, 128, max_new_tokens=1, cache_dtype="i8", scales="token"),
    Configuration(90, 192, max_new_tokens=8, features=True),
    Configuration(90, 80, max_new_tokens=8, dtype="fp16", cache_dtype="fp16"),
    Configuration(90, 256, dtype="fp16", cache_dtype="i8", block_size=16, scales="token", features=True),
    Configuration(90, 128, max_new_tokens=8, cache_dtype="fp8e4nv", scales="token"),
]
