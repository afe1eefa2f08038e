"""Speculation modes: where a request's drafts come from. A pod has one; a request may ask for another."""

from __future__ import annotations

import enum

from tandem_core.errors import InvalidRequestError, quoted

#: Tokens of a linear draft: the copy length of TACO-LLM's published table.
MAX_CHAIN = 7


class SpeculationMode(enum.StrEnum):
    """Sources and shape of drafts. The values are those of flags and of the wire."""

    OFF = "off"
    #: The sequence's own prompt and output.
    LOCAL = "local"
    #: Sources as GLOBAL, but linear drafts of at most MAX_CHAIN tokens; for comparison.
    CHAIN = "chain"
    #: The sequence's own text and what other requests of the tenant have generated, in trees.
    GLOBAL = "global"

    @property
    def uses_shared_text(self) -> bool:
        """Whether drafts come from other requests' text too."""
        return self in (SpeculationMode.CHAIN, SpeculationMode.GLOBAL)

    @classmethod
    def parse(cls, name: str) -> SpeculationMode | None:
        """The mode a request names; "" is None: the pod's own. Raises InvalidRequestError."""
        if name and name not in tuple(cls):
            raise InvalidRequestError(
                "speculation", f"{quoted(name)} is unknown; use one of {', '.join(cls)}"
            )
        return cls(name) if name else None
