"""Files as they may arrive: bytes changed, taken out and put in, and the end missing."""
from __future__ import annotations

import random
from collections.abc import Iterator


def damaged(whole: bytes, seed: int, num: int = 125) -> Iterator[bytes]:
    """`num` damaged copies."""
    draw = random.Random(seed)
    for _ in range(num):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 3, 30))):
            place = draw.randrange(len(data))
            data[place:place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        yield bytes(data[:draw.choice((len(data), draw.randrange(len(data))))])
