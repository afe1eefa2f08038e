"""Finds which types of transformers run through its modules, and writes the tables of docs/models.md.

    decoder_types.py           compares every type with eager mode, writes models/module_types.json and docs
    decoder_types.py --docs    writes docs alone, from module_types.json and the native families

The comparison at load (models/modules.py) decides here, with small random models.
tests/engine/test_module_types.py then proves each listed type through the engine, and that the docs say what
the table says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT / "tests" / "helpers"))
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

_TABLE = _ROOT / "engine" / "tandem_engine" / "models" / "module_types.json"
_DOCS = _ROOT / "docs" / "models.md"
#: Largest relative error of logits in float32.
_MOST = 1e-4
#: Recurrent modules that continue in chunks as exactly as token by token differ by less.
_MOST_IN_CHUNKS = 2e-5


def compare(model_type: str) -> dict[str, Any] | str:
    """What ModuleType holds, or why the type is not served."""
    from tandem_core.errors import ModelLoadError
    from tandem_engine.models.modules import ModulesDecoder
    from tiny_decoders import CONTEXT, tiny_model

    def decoder(*, in_chunks: bool) -> ModulesDecoder:
        return ModulesDecoder(tiny_model(model_type), CONTEXT, in_chunks=in_chunks)

    try:
        found = decoder(in_chunks=False)
        if found.difference > _MOST:
            return f"logits differ by {found.difference:.1e}"
        proven: dict[str, Any] = {}
        if found.is_recurrent:
            proven["is_recurrent"] = True
            with contextlib.suppress(ModelLoadError):
                if decoder(in_chunks=True).difference < _MOST_IN_CHUNKS:
                    proven["in_chunks"] = True
        if not found.takes_drafts:
            proven["takes_drafts"] = False
        return proven
    except ModelLoadError as error:
        return str(error)
    except Exception as error:  # a config that the small sizes do not fit
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def find_types() -> dict[str, Any]:
    from tiny_decoders import decoder_types, text_types

    types: dict[str, Any] = {}
    for model_type in decoder_types():
        result = compare(model_type)
        print(f"{model_type:28} {result}", flush=True)
        if not isinstance(result, str):
            types[model_type] = result
    return {"types": types, "text_types": {k: v for k, v in text_types().items() if v in types}}


def write_docs() -> None:
    from tandem_engine.models.type_table import BEGIN, END, rows

    before, _, rest = _DOCS.read_text(encoding="utf-8").partition(BEGIN)
    _DOCS.write_text(
        before + BEGIN + "\n" + "\n".join(rows()) + "\n" + END + rest.partition(END)[2], encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", action="store_true")
    if not parser.parse_args().docs:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        _TABLE.write_text(json.dumps(find_types(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    write_docs()


if __name__ == "__main__":
    main()
