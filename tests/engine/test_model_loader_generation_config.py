"""What a model's own files recommend for sampling."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from gguf_files import VOCABULARY, Kind, write_gguf
from tandem_core.errors import ModelLoadError
from tandem_core.model.catalogue import catalogue
from tandem_core.model.manifest import ModelManifest
from tandem_core.sampling import SamplingParams
from tandem_engine.model_loader import complete, pull
from tandem_engine.model_loader.generation_config import recommended_sampling


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": [1, 2], "do_sample": True, "temperature": None}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0,
             "repetition_penalty": 1.05},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05},
        ),
        ({"top_k": -1, "max_new_tokens": 2048.0}, {"top_k": 0, "max_tokens": 2048}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0, "top_p": 0.8}),
    ],
)  # fmt: skip
def test_a_checkpoint_s_generation_config(tmp_path: Path, config: object, expected: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    found = recommended_sampling(tmp_path)
    assert found == expected
    SamplingParams(**found)


@pytest.mark.parametrize("value", ['"0.7"', "true", "NaN", "1e999", "9" * 400, "[0.5]", "{}"])
def test_a_value_that_is_not_a_number_is_refused_by_name(tmp_path: Path, value: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"temperature": {value}}}')
    with pytest.raises(ModelLoadError, match=r"generation_config.json: temperature is .* must be a number"):
        recommended_sampling(tmp_path)


def test_half_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 2.5}')
    with pytest.raises(ModelLoadError, match=r"top_k is '2.5', but must be a whole number"):
        recommended_sampling(tmp_path)


def keys(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "</s>", "<|endoftext|>", *(f"token {n}" for n in range(VOCABULARY - 3))])
    writer.add_token_types([1, 3, 1] + [1] * (VOCABULARY - 3))
    writer.add_token_merges([])
    writer.add_float32("general.sampling.temp", 0.7)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.top_p", 0.75)
    writer.add_float32("general.sampling.min_p", 0.125)
    writer.add_float32("general.sampling.penalty_repeat", 1.25)


RECOMMENDED = {"temperature": 0.7, "top_k": 20, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.25}


def test_sampling_keys_of_a_gguf_reach_new_and_old_manifests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    (path,) = write_gguf(tmp_path / "model.gguf", lambda name: Kind.Q4_0, keys=keys)
    folder = pull(str(path))
    manifest = ModelManifest.read(folder)
    assert (manifest.sampling, manifest.eos_token_ids) == (RECOMMENDED, (1, 2))
    tokenizer = (folder / "tokenizer.json").read_bytes()

    def pretend_it_is_old() -> None:
        replace(manifest, eos_token_ids=(1,), tokenizer_hash="ab", recommended_sampling=None).write(folder)
        (folder / "tokenizer.json").write_text("{}")

    for bring_up_to_date in (lambda: pull(str(path)), lambda: complete(folder)):
        pretend_it_is_old()
        bring_up_to_date()
        assert ModelManifest.read(folder) == manifest
        assert (folder / "tokenizer.json").read_bytes() == tokenizer
        assert not [p for p in folder.iterdir() if p.is_dir()]
    pretend_it_is_old()
    path.unlink()
    complete(folder)  # and serves as before
    assert ModelManifest.read(folder).eos_token_ids == (1,)


def test_every_model_of_the_catalogue_recommends_something_valid() -> None:
    for entry in catalogue().values():
        assert SamplingParams(**entry.sampling) != SamplingParams()
