"""`tandem model` with models that transformers' modules compute."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoder_proof import pulled
from tandem_cli.main import app
from tandem_engine.model_loader import modules_loading
from tiny_decoders import tiny_model as make_tiny
from typer.testing import CliRunner, Result


def tandem(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["model", *arguments])


def test_a_model_through_transformers_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled(make_tiny("granitemoeshared"), tmp_path)
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    assert "granitemoeshared (through transformers)" in tandem("list").stdout
    assert "granitemoeshared (through transformers)" in tandem("show", "granitemoeshared").stdout


def test_families_are_listed_with_their_executor() -> None:
    rows = [line.split() for line in tandem("list", "--families").stdout.splitlines()]
    assert ["llama", "native", "yes", "yes", "if"] in [row[:5] for row in rows]
    assert ["mamba", "through", "transformers", "no", "no", "no"] in [row[:6] for row in rows]


def test_check_compares_the_executor_with_eager_mode(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ("check", str(tiny_model), "--prompt", "0123 0123 0123")
    agreed = tandem(*prompt)
    assert agreed.exit_code == 0, agreed.output
    assert "native with transformers" in agreed.stdout
    assert "20 tokens are equal" in agreed.stdout
    read = modules_loading._read_weights

    def other(path: Path) -> dict[str, object]:
        weights = read(path)
        weights["model.layers.1.mlp.up_proj.weight"] = -weights["model.layers.1.mlp.up_proj.weight"]
        return weights

    monkeypatch.setattr(modules_loading, "_read_weights", other)
    disagreed = tandem(*prompt)
    assert disagreed.exit_code == 1
    assert "the executors disagree" in disagreed.output
