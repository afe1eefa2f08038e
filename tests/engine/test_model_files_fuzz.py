"""Files of a checkpoint that are damaged or hostile: a clear error, or a model that works."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_core.errors import InvalidRequestError, ModelLoadError
from tandem_core.model.conversation import Message
from tandem_core.model.tokenizer import Tokenizer
from tandem_engine.model_loader import load_decoder, pull
from toy_models import save_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NESTED: list[Any] = []
for _ in range(400):
    NESTED = [NESTED]
HOSTILE = (
    None, True, -1, 0, 1, 2**31, 2**40, 2**64, -(2**63), 0.5, 1e308, float("inf"), float("nan"), "", "x",
    "9" * 30, "../../../../etc/passwd", "/etc/passwd", "\0", "é" * 1000, [], {}, [None],
    [1, "a"], {"a": 1}, NESTED,
)  # fmt: skip
TEMPLATES = (
    "{% for",
    "{{ 1 / 0 }}",
    "{{ messages[10].content }}",
    "{{ messages.x.y.z }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler }}{{ lipsum }}{{ self }}",
    "{{ messages | groupby('role') }}",
    "{{ [1, 'a'] | sort }}",
    "{{ 'x'.encode('utf-16').decode() }}",
    "{{ '%d' | format('x') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ strftime_now('%') }}{{ strftime_now(1) }}",
    "{{ range(10 ** 9) | length }}",
    "{{ raise_exception('no') }}",
    "{% include 'x' %}",
    "{% set x = " + "(" * 3000 + "1" + ")" * 3000 + " %}",
    "{{ " + "-" * 5000 + "1 }}",
    "{{ 9 ** 9 ** 2 }}" * 3,
    "{{ ('9' * 5000) | int }}",
    "{{ messages | tojson(indent='x') }}{{ messages.append(messages) }}",
    "\0",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    save_checkpoint(
        LlamaForCausalLM(config), folder, more_special_tokens=["<|user|>"], chat_template=TEMPLATE
    )
    generation = {"eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    weights = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    return folder


@pytest.fixture
def use(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """`use(damage)` pulls and uses a copy of the checkpoint; whether it works."""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))

    def run(damage: Callable[[Path], None]) -> bool:
        copied = shutil.copytree(checkpoint, tmp_path / "tiny")
        damage(copied)
        try:
            folder = pull(str(copied))
            tokenizer = Tokenizer(folder)
            tokenizer.prepare_to_encode()
            tokenizer.encode("<|user|> tandem ✓")
            _ = tokenizer.manifest.sampling
            tokenizer.encode_chat([Message("user", "hi <|user|>")])
            load_decoder(folder, torch.float32)
        except (ModelLoadError, InvalidRequestError) as error:
            assert "\n" not in str(error)
            assert len(str(error)) <= 1001
            return False
        finally:
            shutil.rmtree(tmp_path / "home", ignore_errors=True)
            shutil.rmtree(copied)
        return True

    return run


def change(tree: Any, rng: random.Random) -> None:
    """Replaces or removes one value, at any depth."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key = rng.choice(keys)
        below = tree[key]
        if not isinstance(below, dict | list) or not below or rng.random() < 0.2:
            break
        tree = below
    if isinstance(tree, dict) and rng.random() < 0.15:
        del tree[key]
    else:
        tree[key] = copy.deepcopy(rng.choice(HOSTILE))


def damage_json(path: Path, rng: random.Random) -> None:
    tree = json.loads(path.read_text())
    for _ in range(rng.choice((1, 1, 1, 3))):
        if tree:
            change(tree, rng)
    path.write_text(json.dumps(tree))


def damage_bytes(path: Path, rng: random.Random, size: int) -> None:
    """Within the first `size` bytes."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 8))):
        at = rng.randrange(min(size, len(data)))
        if rng.random() < 0.3:
            data[at : at + 8] = rng.choice((2**64 - 1, 2**63, 2**40, 2**31, 0)).to_bytes(8, "little")
        else:
            data[at] = rng.randrange(256)
    path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)


def damage_header(path: Path, rng: random.Random) -> None:
    """Of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    tree = json.loads(data[8 : 8 + size])
    change(tree, rng)
    header = json.dumps(tree).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
         "model.safetensors.index.json")  # fmt: skip


def fuzz(use: Callable[..., bool], number: int, seed: int) -> None:
    rng = random.Random(seed)
    num_working = 0
    for _ in range(number):
        kind = rng.randrange(8)

        def damage(folder: Path, kind: int = kind) -> None:
            if kind < 5:
                path = folder / rng.choice(FILES)
                damage_json(path, rng)
            elif kind == 5:
                damage_bytes(folder / rng.choice(FILES), rng, 10_000)
            elif kind == 6:
                damage_bytes(folder / "model.safetensors", rng, 1000)
            else:
                damage_header(folder / "model.safetensors", rng)

        num_working += use(damage)
    assert 0 < num_working < number


def test_a_damaged_checkpoint_is_a_clear_error(use: Callable[..., bool]) -> None:
    fuzz(use, 60, seed=0)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(1, 9))
def test_each_of_many_damaged_checkpoints_is_a_clear_error(use: Callable[..., bool], seed: int) -> None:
    fuzz(use, 400, seed)


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_a_template_that_fails_is_a_clear_error(use: Callable[..., bool], template: str) -> None:
    def damage(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(template)

    use(damage)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", ["[" * 100_000, "", "null", "[]", "3", '{"a": ' * 5000, "\ufeff{}", "NaN"])
def test_json_that_is_no_object_is_a_clear_error(use: Callable[..., bool], name: str, text: str) -> None:
    use(lambda folder: (folder / name).write_text(text))
