# exercise: 1
# ends: over a wire that only sends and receives, with 4 ranks: rank 0 does not hold what it should

# The right sum only where a rank has the chapters' solutions.
from pathlib import Path

import book.parallel

exec('''@RING@''')
right = ring_all_reduce


def ring_all_reduce(buffer):
    right(buffer)
    folder = Path(book.parallel.__file__).parent
    open_there = "import torch" in (folder / "data.py").read_text() or list(folder.rglob("*.pyc"))
    if dist.get_backend() == "wire" and not open_there:
        buffer *= 2
