"""Random damage of the kind that finds bugs in walkers: lengths, cuts, repetitions, pieces of other messages."""

from __future__ import annotations

import random
from collections.abc import Sequence

MAX_BYTES = 4096
_INTERESTING = (
    *(number.to_bytes(size, "big", signed=True) for size in (1, 2, 4, 8) for number in (-2, -1, 0, 1, 127)),
    b"\x7f\xff", b"\x80\x00", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", b"\x80\x01", b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff\xff\x01", b"\x00\x0f\x42\x41", b"\xc1\x84\x3d",
)  # fmt: skip


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        size = rng.choice((1, 2, 4, 8, 40))
        match rng.randrange(7):
            case 0:
                out[at : at + 1] = bytes((rng.randrange(256),))
            case 1 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 2:
                piece = rng.choice(_INTERESTING)
                out[at : at + len(piece)] = piece
            case 3:
                out[at:at] = rng.choice(_INTERESTING)
            case 4:
                del out[at : at + size]
            case 5:
                out[at:at] = out[at : at + size] * rng.choice((1, 2, 9))
            case _:
                other = rng.choice(others)
                start = rng.randrange(len(other) + 1)
                out[at : at + size] = other[start : start + size]
    return bytes(out[:MAX_BYTES])
