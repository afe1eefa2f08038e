"""What `tandem model rm` deletes, and what it leaves alone."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from model_folders import make_folder
from tandem_core.errors import ModelLoadError
from tandem_core.model.registry import list_models
from tandem_engine.model_loader import remove


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models in a store of their own; the first one's folder."""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    for name in ("one", "two"):
        make_folder(tmp_path / "models" / name, name=name)
    (tmp_path / "models" / "one" / "model-float32.safetensors").write_bytes(bytes(5000))
    return tmp_path / "models" / "one"


def test_a_model_goes_with_all_its_files_and_no_other_one(stored: Path) -> None:
    removed = remove("one")
    assert removed.folder == stored
    assert next(iter(removed.files.items())) == ("model-float32.safetensors", 5000), "the largest comes first"
    assert removed.num_bytes > 5000
    assert [path.name for path in stored.parent.iterdir()] == ["two"]


def test_a_model_that_a_process_maps_stays(stored: Path) -> None:
    with (stored / "model-float32.safetensors").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with pytest.raises(ModelLoadError, match=r"in use by process \d+"):
        remove("one")
    assert len(list_models()) == 2
    mapped.close()
    remove("one")
    assert len(list_models()) == 1


def test_what_an_unfinished_pull_has_left_goes(stored: Path) -> None:
    (stored.parent / ".three.new").mkdir()
    (stored.parent / ".three.new" / "three.gguf.partial").write_bytes(bytes(7))
    assert remove("three").files == {"three.gguf.partial": 7}
    assert sorted(path.name for path in stored.parent.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("name", ["nothing", "", ".", "..", "../models", "/", "one/../two"])
def test_a_name_that_is_not_stored_is_refused_with_those_that_are(stored: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match="stored are: one, two"):
        remove(name)
    assert len(list_models()) == 2
