"""The random numbers of sampling: a pure function of (seed, position), with no state to keep or to ship.

`position` is the index, in prompt + output, of the token being chosen. A token is therefore the same
whether it was chosen alone or in a batch, as a draft's bonus or one at a time, before or after a
preemption, on this pod or on another: nobody has to carry a generator along.

The function is SplitMix64 (Steele, Lea, Flood 2014) read at random access: a SplitMix64 generator adds
GAMMA to its state and returns mix(state), so its n-th output is mix(start + n * GAMMA). The seed goes
through mix first, since users pick seeds like 0, 1, 2 and a raw seed + GAMMA would be the stream of
`seed` shifted by one. Plain integers, because a generator object per token (numpy's Philox) costs ten
times as much.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MANTISSA_BITS = 53


def _mix(z: int) -> int:
    """SplitMix64's finaliser, a bijection on 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def splitmix64(start: int, n: int) -> int:
    """The n-th output (n = 1 is the first) of a SplitMix64 generator whose state begins at `start`."""
    return _mix((start + n * _GAMMA) & _MASK)


def uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1), a multiple of 2^-53, for seed in [0, 2^64) and position >= 0."""
    bits = splitmix64(_mix((seed + _GAMMA) & _MASK), position + 1)
    return float(bits >> (64 - _MANTISSA_BITS)) / float(1 << _MANTISSA_BITS)
