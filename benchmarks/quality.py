"""What numerics cost in quality: perplexity, and agreement with float32, on real dialogues.

    python benchmarks/quality.py --dataset dialogues.jsonl --out benchmarks/results/NAME.md

Every model reads the same dialogues (teacher-forced, so that errors do not run away) and predicts each next
token. Reported per numerics:

    perplexity   exp of the mean negative log probability of the tokens that followed
    top-1        how often the most likely token is float32's
    KL           mean divergence from float32's distribution, in nats
    file         bytes of the weight file: what a decode step reads from memory, and the embedding

float32 is computed by torch alone, without any of our kernels. transformers in bfloat16 stands beside ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_model import load
from reporting import describe_command, describe_machine, markdown_table
from tandem_cli.bench.dataset import load_dialogues, sample_dialogues
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer
from tandem_engine import model_loader
from tandem_engine.model_loader import load_decoder
from tandem_engine.models import Decoder, ModelInputs, Quantization
from tandem_engine.models.layout import WeightForm
from tandem_kernels import AttentionMetadata, native, runs_packed

BLOCK_SIZE = 64
Logits = Callable[[Sequence[int]], torch.Tensor]


@dataclass
class Score:
    """Sums over all predicted tokens."""

    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    agreements: int = 0

    def add(self, exact: torch.Tensor, ours: torch.Tensor, following: torch.Tensor) -> None:
        """Log probabilities [n, V] and the tokens [n] that came."""
        self.tokens += len(following)
        self.loss -= ours.gather(1, following.unsqueeze(1)).sum().item()
        self.divergence += (exact.exp() * (exact - ours)).sum().item()
        self.agreements += int((exact.argmax(1) == ours.argmax(1)).sum())

    def row(self, name: str, file_bytes: int) -> list[str]:
        n = self.tokens
        perplexity = torch.tensor(self.loss / n).exp().item()
        cells = [f"{perplexity:.4f}", f"{100 * self.agreements / n:.2f} %", f"{self.divergence / n:.5f}"]
        return [name, *cells, f"{file_bytes / 1e6:.0f} MB" if file_bytes else "-"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument("--dialogues", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of one dialogue")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = model_loader.pull(model_loader.DEFAULT_MODEL)
    dialogues = load_dialogues(options.dataset) if options.dataset else sample_dialogues()
    tokenizer = Tokenizer(folder)
    texts = [tokenizer.encode(d.as_text())[: options.tokens] for d in dialogues[: options.dialogues]]
    names, models, sizes = zip(*_models(folder), strict=True)
    exact_model = _without_kernels(folder)
    scores = [Score() for _ in models]
    for text in texts:
        following = torch.tensor(text[1:])
        exact = exact_model(text)[:-1].log_softmax(-1)
        for score, model in zip(scores, models, strict=True):
            score.add(exact, model(text)[:-1].log_softmax(-1), following)
    rows = [score.row(*about) for score, *about in zip(scores, names, sizes, strict=True)]
    table = markdown_table(["numerics", "perplexity", "top-1", "KL from float32", "file"], rows)
    report = (
        f"Command: `{describe_command()}`  \nHardware: {describe_machine()}; {model_loader.DEFAULT_MODEL}; "
        f"{len(texts)} dialogues, {scores[0].tokens} predicted tokens.\n\n{table}\n"
    )
    options.out.write_text(report)
    print(report)


def _models(folder: Path) -> Iterator[tuple[str, Logits, int]]:
    for dtype in (torch.float32, torch.bfloat16):
        for quantization in Quantization:
            name = f"{str(dtype).removeprefix('torch.')}, {quantization}"
            form = WeightForm(dtype, runs_packed(dtype, torch.device("cpu")), quantization)
            decoder = load_decoder(folder, dtype, quantization=quantization)
            yield name, lambda text, d=decoder: _logits(d, text), (folder / form.file_name).stat().st_size
    yield "transformers, bfloat16", _transformers(folder), 0


def _without_kernels(folder: Path) -> Logits:
    """float32 through torch's operators."""
    library, native.LIBRARY = native.LIBRARY, None
    try:
        decoder = load_decoder(folder, torch.float32)
    finally:
        native.LIBRARY = library

    def logits(text: Sequence[int]) -> torch.Tensor:
        kept, native.LIBRARY = native.LIBRARY, None
        try:
            return _logits(decoder, text)
        finally:
            native.LIBRARY = kept

    return logits


def _logits(decoder: Decoder, text: Sequence[int]) -> torch.Tensor:
    """[len(text), V] float32."""
    config, n = decoder.config, len(text)
    num_blocks = -(-n // BLOCK_SIZE)
    shape = (num_blocks, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    caches = [torch.zeros(shape, dtype=decoder.dtype) for _ in range(config.num_layers)]
    metadata = AttentionMetadata(
        block_table=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        query_start_loc=torch.tensor([0, n], dtype=torch.int32),
    )
    positions = torch.arange(n)
    inputs = ModelInputs(torch.tensor(text), positions, positions, metadata)
    return decoder.logits(decoder.forward(inputs, caches))


def _transformers(folder: Path) -> Logits:
    model = load(folder / ModelManifest.read(folder).weights, torch.bfloat16)

    @torch.inference_mode()
    def logits(text: Sequence[int]) -> torch.Tensor:
        rows: torch.Tensor = model(torch.tensor([text])).logits[0].float()
        return rows

    return logits


if __name__ == "__main__":
    main()
