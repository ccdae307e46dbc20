"""Random numbers as a function: a hash of integers (SplitMix64, Steele et al. 2014), with no state to save or to share.

The same arithmetic on CPU and GPU: int64 multiplication wraps around on both.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MASK = 2**64 - 1


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64; the masks make the arithmetic shifts logical ones."""
    mixed = (x >> 30).bitwise_and_(0x3FFFFFFFF).bitwise_xor_(x).mul_(-4658895280553007687)
    mixed = (mixed >> 27).bitwise_and_(0x1FFFFFFFFF).bitwise_xor_(mixed).mul_(-7723592293110705685)
    return (mixed >> 31).bitwise_and_(0x1FFFFFFFF).bitwise_xor_(mixed)


def combine(key: Tensor, number: Tensor) -> Tensor:
    """Hash keys and numbers (int64, broadcast) into new keys."""
    return draw(start_stream(key), number)


def start_stream(key: Tensor) -> Tensor:
    """Return what `draw` needs of a key; once for many numbers: `combine(key, n) = draw(start_stream(key), n)`."""
    return _mix(key)


def draw(stream: Tensor, number: Tensor) -> Tensor:
    """Return key number `number` of each stream (int64, broadcast)."""
    return _mix(torch.add(stream, number + 1, alpha=_GAMMA))


def derive_seed(*parts: int) -> int:
    """Return one int64 seed from several integers, for example (run seed, step)."""
    key = torch.zeros((), dtype=torch.int64)
    for part in parts:
        wrapped = (part & _MASK) - 2**64 if part & 2**63 else part & _MASK
        key = combine(key, torch.tensor(wrapped, dtype=torch.int64))
    return int(key)


def uniform(key: Tensor) -> Tensor:
    """Return float64 numbers of the open interval (0, 1), one for each key."""
    # 52 bits and a half are exact in float64; with 53 the largest number would round to 1.
    return (key >> 12).bitwise_and_(2**52 - 1).double().add_(0.5).mul_(2.0**-52)
