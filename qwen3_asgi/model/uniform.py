"""One uniform number per (seed, output position), from arithmetic alone.

A counter-based generator has no state to keep, copy or lose: a request that is preempted and
resumed, or shares its batch with others, draws the same numbers.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, made odd


def uniform(seed: int, position: int) -> float:
    """Return a float in [0, 1) with 53 random bits.

    The seed is mixed before it becomes the state, so that neighbouring seeds share no outputs.
    """
    return float(splitmix64(_mix(seed & _MASK), position) >> 11) * 2.0**-53


def splitmix64(state: int, index: int) -> int:
    """Return output number `index` (from 0) of SplitMix64 started at `state`, 64 bits.

    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
    doi:10.1145/2660193.2660195; constants of Vigna's public-domain splitmix64.c.
    """
    return _mix((state + (index + 1) * _GAMMA) & _MASK)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
