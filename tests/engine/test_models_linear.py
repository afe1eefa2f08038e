"""Projection policies agree with a plain matrix product, and dtypes are picked by what is fast."""

from __future__ import annotations

import pytest
import torch
from native_libraries import native_library
from tandem_core.errors import ModelLoadError
from tandem_engine.models import pick_dtype
from tandem_engine.models.linear import PackedLinear, PlainLinear, UpcastLinear, cpu_has_bf16, linear_policy
from tandem_kernels import PackedWeight, pack_weight


@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_upcast_bfloat16_is_right_to_one_rounding(num_rows: int) -> None:
    """Layers share the scratch buffer, so a second layer must not disturb the first's results."""
    torch.manual_seed(0)
    scratch = torch.empty(64 * 32)
    small, large = torch.randn(8, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    bias, x = torch.randn(8).bfloat16(), torch.randn(num_rows, 32).bfloat16()
    first, second = UpcastLinear(small, bias, scratch), UpcastLinear(large, None, scratch)
    for _ in range(2):
        exact = x.double() @ small.double().t() + bias.double()
        torch.testing.assert_close(first(x).double(), exact, atol=0.05, rtol=2**-7)
        torch.testing.assert_close(second(x).double(), x.double() @ large.double().t(), atol=0.05, rtol=2**-7)


def test_auto_is_bfloat16_only_where_the_hardware_multiplies_it() -> None:
    assert pick_dtype("auto") == (torch.bfloat16 if cpu_has_bf16() else torch.float32)
    assert pick_dtype("auto", "cuda") == torch.bfloat16
    assert pick_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(ModelLoadError, match="'int3' is not supported; use auto, float32"):
        pick_dtype("int3")


def test_policies_follow_the_device_the_dtype_and_the_file() -> None:
    cpu, weight = torch.device("cpu"), torch.ones(32, 16)
    for device in (cpu, torch.device("cuda")):
        assert isinstance(linear_policy(torch.float32, device, 512)(weight, None), PlainLinear)
    packed = linear_policy(torch.float32, cpu, 512)(PackedWeight.of(pack_weight(weight)), None)
    assert isinstance(packed, PackedLinear)


def test_without_compiled_kernels_bfloat16_is_multiplied_in_float32_unless_the_cpu_can() -> None:
    with native_library("off"):
        policy = linear_policy(torch.bfloat16, torch.device("cpu"), 512)
    wanted = PlainLinear if cpu_has_bf16() else UpcastLinear
    assert isinstance(policy(torch.ones(32, 16).bfloat16(), None), wanted)
