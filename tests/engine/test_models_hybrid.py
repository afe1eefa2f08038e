"""Models with recurrent layers compute what transformers computes, in any chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hybrid_models import VARIANTS, prompts, randomize
from native_libraries import native_library
from paged_model import PagedModel
from tandem_engine.model_loader import load_decoder, pull
from toy_models import save_checkpoint
from transformers import PreTrainedModel


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """variant name -> (transformers' model, our model folder)"""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    torch.set_num_threads(1)

    def make(variant: str) -> tuple[PreTrainedModel, Path]:
        model = randomize(VARIANTS[variant]())
        checkpoint = tmp_path / variant
        save_checkpoint(model, checkpoint)
        return model, pull(str(checkpoint))

    return make


@pytest.mark.parametrize("library", [None, "off"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(stored, variant: str, library: str | None) -> None:
    model, folder = stored(variant)
    first, second = prompts(61, 38)
    with native_library(library):
        paged = PagedModel(load_decoder(folder, torch.float32), num_sequences=2)
        steps = [
            paged.step([first[:23], second[:2]]),
            paged.step([first[23:59], second[2:36]]),
            paged.step([first[59:60], second[36:37]]),
            paged.step([first[60:], second[37:]]),
        ]
    for b, prompt in enumerate((first, second)):
        ours = torch.cat([step[b] for step in steps])
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0]
        assert theirs.std() > 0.1, "logits this flat would agree by accident"
        torch.testing.assert_close(ours, theirs, atol=1e-4 * theirs.std().item(), rtol=1e-4)
