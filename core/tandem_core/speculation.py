"""What a request's drafts are made of; a pod has one, and a request may ask for another."""

from __future__ import annotations

import enum

#: Guesses of a linear draft: the copy length of TACO-LLM's published table.
MAX_CHAIN = 7


class SpeculationMode(enum.Enum):
    """Where guesses come from, and in which shape."""

    OFF = "off"
    #: The sequence's own prompt and output.
    LOCAL = "local"
    #: Those and what other requests of the tenant have generated, in trees.
    GLOBAL = "global"
    #: The same text, at most MAX_CHAIN guesses, one after the other: to compare with.
    CHAIN = "chain"
