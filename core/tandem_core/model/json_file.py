"""JSON files of a model, which are untrusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem_core.errors import ModelLoadError


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises FileNotFoundError, and ModelLoadError for anything else than an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); pull the model again") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} is not a JSON object; pull the model again")
    return found
