"""Compares the perplexity of Tandem and of transformers on quantized safetensors.

    PYTHONPATH=tests/helpers python benchmarks/checkpoint_quality.py --dataset dialogues.jsonl --out FILE.md

The default model's projections are written in each format (tests/helpers/quantized_checkpoints.py, round to
nearest; its checks against the formats' own libraries are described in docs/decisions/quantised-weights.md).
Tandem pulls the file and computes in its defaults; transformers computes the numbers that the format
defines, in float32. The difference is what Tandem's packing and its activations of 8 bits cost.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf_quality import logits_of, perplexity_of
from numpy.typing import NDArray
from quantized_checkpoints import FORMATS, write_quantized
from reporting import markdown_table, page
from tandem_cli.bench.dataset import load_dialogues
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer
from tandem_engine.model_loader import DEFAULT_MODEL, load_decoder, pull
from tandem_engine.model_loader.convert import open_source, quantized_bits
from tandem_engine.model_loader.gguf_source import GgufSource
from tandem_engine.model_loader.loading import pick_numerics
from tandem_engine.model_loader.stored import keeps_codes, pick_packing
from tandem_engine.models import ModelConfig
from tandem_kernels import quantized_shape
from transformers import LlamaConfig, LlamaForCausalLM

HEAD = ("format", "held as", "bits", "codes kept", "transformers", "Tandem", "difference", "same top token")


def theirs_of(model: LlamaForCausalLM, text: Sequence[int]) -> NDArray[np.floating]:
    with torch.inference_mode():
        logits: NDArray[np.floating] = model(torch.tensor([text])).logits[0].numpy()
    return logits


def measure(options: argparse.Namespace) -> Iterator[list[str]]:
    model_dir = pull(DEFAULT_MODEL)
    manifest, tokenizer = ModelManifest.read(model_dir), Tokenizer(model_dir)
    dialogues = load_dialogues(options.dataset)[: options.dialogues]
    texts = [tokenizer.encode(dialogue.as_text())[: options.tokens] for dialogue in dialogues]
    source = GgufSource((model_dir / manifest.weights).resolve())
    config = source.hf_config()
    weights = {name: source.get(name) for name in source.names()}
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    for name in options.formats:
        with tempfile.TemporaryDirectory() as temporary:
            checkpoint, folder = Path(temporary) / "checkpoint", Path(temporary) / "model"
            values = write_quantized(checkpoint, config, weights, FORMATS[name])
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
            opened = open_source(checkpoint)
            bits = quantized_bits(ModelConfig.from_hf(config), opened)
            replace(manifest, weights=str(checkpoint), weight_bits=bits).write(folder)
            numerics = pick_numerics(folder)
            decoder = load_decoder(folder, numerics.dtype, quantization=numerics.quantization)
        model.load_state_dict(values, strict=False)
        expected = {tuple(text): theirs_of(model, text) for text in texts}
        ours = {tuple(text): logits_of(decoder, text) for text in texts}
        same = np.concatenate([expected[key].argmax(1) == ours[key].argmax(1) for key in expected])
        theirs, mine = (
            perplexity_of(lambda text, of=of: of[tuple(text)], texts)  # type: ignore[misc]
            for of in (expected, ours)
        )
        grid = opened.grid("model.layers.0.self_attn.q_proj.weight")
        assert grid is not None
        shape = quantized_shape(32, 2 * pick_packing(grid).depth, pick_packing(grid))
        assert shape is not None
        yield [
            f"{name} ({grid.name})", pick_packing(grid).name,
            f"{8 * shape[1] * shape[2] / (64 * pick_packing(grid).depth):.2f}",
            "yes" if keeps_codes(grid) else "no", f"{theirs:.4f}", f"{mine:.4f}",
            f"{100 * (mine / theirs - 1):+.2f} %", f"{same.mean():.2%}",
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument("--dialogues", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of one dialogue")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    notes = (
        f"SmolLM2-135M; {options.dialogues} dialogues of at most {options.tokens} tokens. transformers "
        "computes the format's numbers in float32; Tandem uses its defaults, with activations of 8 bits."
    )
    rows = []
    for row in measure(options):
        print(*row, sep="  ", file=sys.stderr, flush=True)
        rows.append(row)
        options.out.write_text(page("Quantised safetensors", markdown_table(HEAD, rows), notes))


if __name__ == "__main__":
    main()
