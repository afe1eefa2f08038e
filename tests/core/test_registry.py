"""Which folder a model's name means, and where Tandem keeps its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_folders import make_folder
from tandem_core.errors import ModelLoadError
from tandem_core.model import registry


def test_the_cache_root_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TANDEM_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert registry.cache_root() == tmp_path / ".cache" / "tandem"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert registry.cache_root() == tmp_path / "xdg" / "tandem"
    monkeypatch.setenv("TANDEM_HOME", "~/elsewhere")
    assert registry.cache_root() == tmp_path / "elsewhere"


def test_a_model_is_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    folder = make_folder(tmp_path / "models" / "org--name", name="org/name")
    assert registry.find("org/name") == registry.resolve("org/name") == folder
    assert registry.find(str(folder)) == registry.resolve(folder) == folder.resolve()
    assert [manifest.name for manifest in registry.list_models()] == ["org/name"]
    assert registry.find("other") is None
    with pytest.raises(ModelLoadError, match=r"no model 'other' .* stored are: org/name;"):
        registry.resolve("other")
