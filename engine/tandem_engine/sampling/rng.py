"""Random numbers for sampling: a pure function of (seed, position, token), without state.

`position` is the index, in prompt + output, of the token being chosen. So a token is the same alone or in a
batch, with or without a draft, before or after a preemption, and on every pod.

The function is SplitMix64 (Steele, Lea, Flood 2014) read at random access: a SplitMix64 generator adds
GAMMA to its state and returns mix(state), so its n-th output is mix(start + n * GAMMA).

    seed --mix--> start of a generator whose output number position + 1 is the key of the position
    key ---------> start of a generator whose output number token + 1 belongs to the token

The seed is mixed first, because a raw seed + GAMMA would give the stream of `seed` shifted by one. A
generator object per position (numpy's Philox) has no access by token id. tandem_kernels.draw_tokens reads the
tokens' outputs.
"""

from __future__ import annotations

from tandem_kernels.draw_tokens import FACTORS, GAMMA

_MASK = (1 << 64) - 1
_SHIFTS = (30, 27, 31)


def splitmix64(start: int, n: int) -> int:
    """The n-th output (n = 1 is the first) of a SplitMix64 generator whose state begins at `start`."""
    z = (start + n * GAMMA) & _MASK
    z = ((z ^ (z >> _SHIFTS[0])) * FACTORS[0]) & _MASK
    z = ((z ^ (z >> _SHIFTS[1])) * FACTORS[1]) & _MASK
    return z ^ (z >> _SHIFTS[2])


def position_key(seed: int, position: int) -> int:
    """64 bits for seed in [0, 2^64) and position >= 0."""
    return splitmix64(splitmix64(seed, 1), position + 1)
