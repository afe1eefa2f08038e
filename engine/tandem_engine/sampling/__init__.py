"""Chooses tokens from logits, one or several per step; the same seed gives the same tokens."""

from tandem_engine.sampling.verify import Verified, Verifier

__all__ = ["Verified", "Verifier"]
