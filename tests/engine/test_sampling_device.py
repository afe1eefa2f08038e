"""The tokens chosen on the device, all rows at once, are those the host chooses one after another."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from tandem_core.sampling import SamplingParams
from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.draft_tree import DraftTree
from tandem_engine.request import Request
from tandem_engine.sampling import Verifier
from tandem_engine.sampling import device as device_module
from tandem_engine.sampling.device import choose_tokens, read_back

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1e-7),
    SamplingParams(temperature=1.2, top_k=30),
    SamplingParams(top_k=10**6),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.5, top_k=100, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=0.9, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, logit_bias={3: 5.0}),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def scheduled(params: SamplingParams, rng: random.Random, vocab_size: int) -> ScheduledSequence:
    """A decoding request; two in three have a draft, as a random tree."""
    prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(2, 9))]
    request = Request("r", prompt, dataclasses.replace(params, seed=rng.getrandbits(64)))
    n = rng.choice([0, 3, 9])
    draft = None
    if n:
        guesses = tuple(rng.randrange(vocab_size) for _ in range(n))
        draft = DraftTree(guesses, tuple(rng.randint(0, i) for i in range(n)), ("output",) * n)
    start = len(prompt) - 1
    return ScheduledSequence(
        request, ((0,),), start, (prompt[-1], *(draft.token_ids if draft else ())), draft, True
    )


def device_or_skip(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale, num_levels", [(3.0, None), (0.01, None), (10.0, None), (3.0, 7)])
@pytest.mark.parametrize("vocab_size", [5, 1000, 20_000])
def test_the_hosts_tokens(vocab_size: int, scale: float, num_levels: int | None, device: str) -> None:
    """Every token the host emits on its walk is the device's choice at that node."""
    device_or_skip(device)
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    num_compared = 0
    for _ in range(2 if vocab_size > 1000 else 20):
        sequences = [scheduled(params, rng, vocab_size) for params in PARAMS]
        num_rows = sum(s.num_logits_rows for s in sequences)
        logits = torch.randn(num_rows, vocab_size, generator=generator) * scale
        if num_levels is not None:
            logits = (logits * num_levels / 20).round()
        chosen = choose_tokens(sequences, logits.to(device)).tolist()
        first_row = 0
        for sequence, host in zip(sequences, Verifier().verify(Batch(tuple(sequences)), logits), strict=True):
            if not sequence.request.sampling.needs_processing:
                ours = [chosen[first_row + node] for node in host.path]
                assert ours == list(host.token_ids), sequence.request.sampling
                num_compared += len(ours)
            first_row += sequence.num_logits_rows
    assert num_compared >= 2 * 9


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_of_a_thousand_rows(device: str) -> None:
    """Enough choices that noise of 1e-4 in a weight would show."""
    device_or_skip(device)
    logits = torch.randn(1000, 3000, generator=torch.Generator().manual_seed(1)) * 2
    params = [SamplingParams(temperature=0.9, top_p=0.97, seed=seed) for seed in range(1000)]
    sequences = [ScheduledSequence(Request("r", [1], p), ((0,),), 0, (1,), None, True) for p in params]
    host = Verifier().verify(Batch(tuple(sequences)), logits)
    assert choose_tokens(sequences, logits.to(device)).tolist() == [
        token for v in host for token in v.token_ids
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_verification_of_what_was_read_back_gives_the_hosts_results(device: str) -> None:
    device_or_skip(device)
    rng = random.Random(2)
    params = [*PARAMS, SamplingParams(logprobs=3), SamplingParams(temperature=0.0, logprobs=0)]
    sequences = [scheduled(each, rng, 50) for each in params * 5]
    logits = torch.randn(sum(s.num_logits_rows for s in sequences), 50) * 3
    batch = Batch(tuple(sequences))
    results = read_back(sequences, logits.to(device), num_likeliest=4)
    assert Verifier().verify(batch, logits, results) == Verifier().verify(batch, logits)
    assert len(results.rows) == 4 * 5
    assert results.likeliest is not None
    assert results.likeliest.token_ids.tolist() == torch.topk(logits, 4).indices.tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8])
def test_the_draws_parameters_are_aligned_whatever_the_number_of_rows(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton would compile the kernel anew for a tensor that begins elsewhere."""
    seen = []
    monkeypatch.setattr(device_module, "draw_tokens", lambda *tensors: seen.extend(tensors) or tensors[1])
    params = [SamplingParams(seed=seed) for seed in range(num_rows)]
    sequences = [ScheduledSequence(Request("r", [1], p), ((0,),), 0, (1,), None, True) for p in params]
    choose_tokens(sequences, torch.zeros(num_rows, 8))
    assert all(tensor.data_ptr() % 16 == 0 for tensor in seen)
    assert [tensor.shape[0] for tensor in seen] == [num_rows] * 6


@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_logits_that_are_no_numbers_give_no_token_to_their_sequence_alone(
    temperatures: tuple[float, float],
) -> None:
    sequences = [
        ScheduledSequence(Request("r", [1], SamplingParams(temperature=t)), ((0,),), 0, (1,), None, True)
        for t in temperatures
    ]
    logits = torch.randn(2, 9)
    logits[0, 5] = torch.nan
    first, second = read_back(sequences, logits).token_ids
    assert first == -1
    assert second >= 0
