"""tokenizer.json and what the manifest says about it, from a checkpoint of any source.

transformers is the reference for a checkpoint's tokenizer, llama.cpp for a GGUF's (gguf_tokenizer.py).
Both are used once, here, and never while serving: the engine and the gateway read only tokenizer.json and the
manifest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tandem_core.errors import ModelLoadError
from tandem_core.model.json_file import read_object
from tokenizers import Tokenizer

from tandem_engine.model_loader.end_tokens import END_TOKENS, FIM_TOKENS
from tandem_engine.model_loader.files import sha256_of
from tandem_engine.model_loader.gguf_file import open_all
from tandem_engine.model_loader.gguf_tokenizer import GgufTokenizer


@dataclass(frozen=True)
class TokenizerFacts:
    bos_token: str
    eos_token: str
    eos_token_ids: tuple[int, ...]
    chat_template: str
    add_bos: bool
    tokenizer_hash: str


def write_tokenizer(source: Path, folder: Path, vocab_size: int) -> TokenizerFacts:
    """Write folder/tokenizer.json from a checkpoint folder or a GGUF file. `vocab_size`: the model's. Raises
    ModelLoadError."""
    facts = _write(source, folder)
    # Tokenizers and configs may name tokens that the model cannot generate.
    return replace(facts, eos_token_ids=tuple(n for n in facts.eos_token_ids if n < vocab_size))


def _write(source: Path, folder: Path) -> TokenizerFacts:
    if source.suffix == ".gguf":
        return _from_gguf(source, folder)
    from transformers import AutoTokenizer  # seconds to import, and only this function needs it

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        ends = _eos_token_ids(source, tokenizer.eos_token_id)
        ends |= _name_control_tokens(tokenizer.backend_tokenizer, ends)
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
        first = tokenizer("a", add_special_tokens=True)["input_ids"][:1]
    except ModelLoadError:
        raise
    except Exception as error:  # transformers and tokenizers raise anything, down to bare Exception
        first_line = (str(error).splitlines() or [""])[0]
        raise ModelLoadError(
            f"the tokenizer of {source} cannot be read ({type(error).__name__}: {first_line}); "
            "use a model with a tokenizer.json"
        ) from error
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = template.get("default", "")
    if not isinstance(template, str):
        raise ModelLoadError(f"the chat template of {source} is no text; use a model with a valid template")
    return TokenizerFacts(
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        eos_token_ids=tuple(sorted(ends)),
        chat_template=template,
        add_bos=tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id],
        tokenizer_hash=sha256_of(folder / "tokenizer.json"),
    )


def _from_gguf(source: Path, folder: Path) -> TokenizerFacts:
    try:
        tokenizer = GgufTokenizer(open_all(source)[0])
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        first_line = (str(error).splitlines() or [""])[0]
        raise ModelLoadError(
            f"the tokenizer in {source} is damaged ({first_line or type(error).__name__}); download it again"
        ) from error
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return TokenizerFacts(
        bos_token=tokenizer.text_of(tokenizer.bos),
        eos_token=tokenizer.text_of(tokenizer.eos),
        eos_token_ids=tokenizer.ends,
        chat_template=tokenizer.chat_template,
        add_bos=tokenizer.add_bos,
        tokenizer_hash=sha256_of(folder / "tokenizer.json"),
    )


def _eos_token_ids(source: Path, eos_token_id: int | None) -> set[int]:
    """All end token ids in the generation config, the model config and the tokenizer."""
    ids: set[int] = set() if eos_token_id is None else {eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = source / name
        if source.is_dir() and path.is_file():
            listed = read_object(path).get("eos_token_id")
            listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
            if any(type(token_id) is not int or not 0 <= token_id < 1 << 24 for token_id in listed):
                raise ModelLoadError(
                    f"{path}: eos_token_id must be a token id or a list of them; pull the model again"
                )
            ids.update(listed)
    return ids


def _name_control_tokens(tokenizer: Tokenizer, listed: set[int]) -> set[int]:
    """The added tokens with the name of an end token. Marks these, the listed end tokens and the
    fill-in-the-middle tokens as control tokens, as in GGUF files, so that they are not part of the text."""
    added = tokenizer.get_added_tokens_decoder()
    for number, token in added.items():
        if not token.special and (number in listed or token.content in END_TOKENS | FIM_TOKENS):
            token.special = True
            tokenizer.add_special_tokens([token])
    return {number for number, token in added.items() if token.content in END_TOKENS}
