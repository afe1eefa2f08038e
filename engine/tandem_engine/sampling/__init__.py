"""Choosing tokens from logits, one or several per step, always the same ones for the same seed."""

from tandem_engine.sampling.verify import Verified, Verifier

__all__ = ["Verified", "Verifier"]
