"""Bytes and operations of a pass, counted by hand for a toy model, and the floors made from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy_models
from floors import Cost, Pass, Weights, cost, floor_s
from tandem_engine import model_loader
from tandem_engine.models.families.config import sub
from toy_floors import ATTENTION, PEAKS, SPEC, WEIGHTS


def test_a_prompt_is_counted_without_what_is_cached() -> None:
    # Keys and values of a token: 2 x 2 heads x 2 x 2 bytes = 16 in each of two layers.
    num_bytes = 1000 + 5 * 2 * 16
    # Three tokens through both layers, and one row of logits.
    projections = 2 * (3 * 2 * 432 + 8 * 50)
    # They see 6, 7 and 8 tokens; scores and values of 4 heads of size 2.
    attention = 2 * 2 * (4 * 2) * 2 * (6 + 7 + 8)
    assert cost(SPEC, WEIGHTS, Pass(3, cached_tokens=5)) == Cost(num_bytes, projections, attention)


def test_a_step_of_a_batch_reads_weights_once_and_each_cache() -> None:
    one, four = (cost(SPEC, WEIGHTS, Pass(1, cached_tokens=9, num_seqs=n)) for n in (1, 4))
    assert one.num_bytes == 1000 + 9 * 32
    assert four.num_bytes == 1000 + 4 * 9 * 32
    assert (four.projection_ops, four.attention_ops) == (4 * one.projection_ops, 4 * one.attention_ops)


def test_every_row_of_a_draft_gets_logits() -> None:
    plain, draft = (cost(SPEC, WEIGHTS, Pass(4, cached_tokens=9, logit_rows=n)) for n in (1, 4))
    assert draft.projection_ops - plain.projection_ops == 2 * 3 * 8 * 50


def test_a_layer_with_a_window_reads_and_sees_no_more_than_it() -> None:
    first, mlp, last, _ = SPEC.sublayers
    sublayers = (first, mlp, sub(replace(ATTENTION, window=4), last.branches[0].pre), mlp)
    windowed = cost(replace(SPEC, sublayers=sublayers), WEIGHTS, Pass(2, cached_tokens=9))
    assert windowed.num_bytes == 1000 + (9 + 4) * 16
    assert windowed.attention_ops == 2 * 2 * 8 * ((10 + 11) + (4 + 4))


def test_the_floor_is_the_larger_time_and_each_part_runs_at_the_rate_of_its_type() -> None:
    one = Pass(3, cached_tokens=5)
    needed = cost(SPEC, WEIGHTS, one)
    computing_s = needed.projection_ops / 16e3 + needed.attention_ops / 4e3
    reading_s = needed.num_bytes / 1e3
    assert computing_s < reading_s
    assert floor_s(SPEC, WEIGHTS, PEAKS, one) == pytest.approx(reading_s)
    fast_memory = replace(PEAKS, read_bytes_per_s=1e6)
    assert floor_s(SPEC, WEIGHTS, fast_memory, one) == pytest.approx(computing_s)


def test_weights_are_those_that_a_step_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    folder = model_loader.pull(str(toy_models.save_llama(tmp_path, seed=0)))
    # Three layers of 64 x (64 + 2 x 32), 64 x 64 and 3 x 64 x 112, and the head; 7 norms of 64 in float32.
    projections = 3 * (64 * 128 + 64 * 64 + 3 * 64 * 112) + 96 * 64
    plain = Weights.of(folder, "bfloat16", "none")
    assert plain == Weights(2 * projections + 4 * 7 * 64, torch.bfloat16, torch.bfloat16)
    quantized = Weights.of(folder, "bfloat16", "w8a8")
    assert (quantized.dtype, quantized.kv_dtype) == (torch.int8, torch.bfloat16)
    # A byte a weight, and two float16 for each group of 32.
    assert projections < quantized.num_bytes < 1.3 * projections
