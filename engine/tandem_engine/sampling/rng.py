"""Random numbers for sampling: a pure function of (seed, position, token), without state.

`position` is the index, in prompt + output, of the token being chosen. So a token is the same alone or in a
batch, with or without a draft, before or after a preemption, and on every pod.

The function is SplitMix64 (Steele, Lea, Flood 2014) read at random access: a SplitMix64 generator adds
GAMMA to its state and returns mix(state), so its n-th output is mix(start + n * GAMMA).

    seed --mix--> start of a generator whose output number position + 1 is the key of the position
    key ---------> start of a generator whose output number token + 1 belongs to the token

The seed is mixed first, because a raw seed + GAMMA would give the stream of `seed` shifted by one. Integer
arithmetic on arrays, because a generator object per position (numpy's Philox) has no access by token id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tandem_kernels.draw_tokens import FACTORS, GAMMA

_MASK = (1 << 64) - 1
_SHIFTS = (30, 27, 31)

#: One bit fewer than float64's mantissa, so that the half added below is exact and 1.0 is never reached.
_BITS = 52

#: Arrays of this many tokens stay in the cache, and below the size for which malloc asks the kernel.
RANGE = 8192
_STEPS = (np.arange(RANGE, dtype=np.uint64) + np.uint64(1)) * np.uint64(GAMMA)


def splitmix64(start: int, n: int) -> int:
    """The n-th output (n = 1 is the first) of a SplitMix64 generator whose state begins at `start`."""
    z = (start + n * GAMMA) & _MASK
    z = ((z ^ (z >> _SHIFTS[0])) * FACTORS[0]) & _MASK
    z = ((z ^ (z >> _SHIFTS[1])) * FACTORS[1]) & _MASK
    return z ^ (z >> _SHIFTS[2])


def position_key(seed: int, position: int) -> int:
    """64 bits for seed in [0, 2^64) and position >= 0."""
    return splitmix64(splitmix64(seed, 1), position + 1)


def uniforms(key: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A uniform number in the open interval (0, 1) for each token id, shape as token_ids."""
    z = token_ids.astype(np.uint64)
    z += np.uint64(1)
    z *= np.uint64(GAMMA)
    z += np.uint64(key)
    return _mixed(z)


def uniforms_of_range(key: int, first: int, stop: int) -> npt.NDArray[np.float64]:
    """uniforms(key, [first, ..., stop - 1]) of at most RANGE tokens, in two thirds of the time."""
    return _mixed(_STEPS[: stop - first] + np.uint64((key + first * GAMMA) & _MASK))


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """States to uniform numbers; z is changed."""
    shifted = z >> np.uint64(_SHIFTS[0])
    z ^= shifted
    z *= np.uint64(FACTORS[0])
    np.right_shift(z, np.uint64(_SHIFTS[1]), out=shifted)
    z ^= shifted
    z *= np.uint64(FACTORS[1])
    np.right_shift(z, np.uint64(_SHIFTS[2]), out=shifted)
    z ^= shifted
    z >>= np.uint64(64 - _BITS)
    u = z.astype(np.float64)
    u += 0.5
    u *= 2.0**-_BITS
    return u
