"""A guide: what the text of an answer must match, whatever the model prefers.

    request (HTTP, gRPC) --> Guide --validate--> gateway --SamplingParams--> pods --compile--> token masks

The grammar languages are those of llguidance (guidance-ai), which guides.py compiles: JSON schemas, regular
expressions, and Lark grammars, in which `%json {...}` embeds a schema and `<name>` a special token.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field

from tandem_core.errors import InvalidRequestError

MAX_GUIDE_BYTES = 128 * 1024
MAX_CHOICES = 4096


class GuideKind(enum.Enum):
    """Language of a guide's source; the names are the fields of the message Guide in common.proto."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True)
class Guide:
    """Immutable; raises InvalidRequestError when the source is empty or too long."""

    kind: GuideKind
    source: str
    #: The caller's field, for error messages; not part of the guide's value.
    field: str = dataclass_field(default="guide", compare=False)

    def __post_init__(self) -> None:
        try:
            num_bytes = len(self.source.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError(
                self.field, f"its {self.kind.value} has half of a surrogate pair; send whole characters"
            ) from None
        if not 1 <= num_bytes <= MAX_GUIDE_BYTES:
            raise InvalidRequestError(
                self.field,
                f"its {self.kind.value} has {num_bytes} bytes; it must have 1 to {MAX_GUIDE_BYTES}",
            )

    @classmethod
    def of_choices(cls, choices: Sequence[str], field: str = "guide") -> Guide:
        """One of the texts, exactly. Raises InvalidRequestError."""
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise InvalidRequestError(
                field, f"has {len(choices)} choices; it must have 1 to {MAX_CHOICES} of them"
            )
        if not all(choices):
            raise InvalidRequestError(field, "has an empty choice; remove it")
        # Lark's strings are written as JSON's are.
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return cls(GuideKind.LARK, f"start: {texts}", field)
