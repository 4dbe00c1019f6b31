# exercise: 1
# ends: a check failed
# right if: found

# The chapters' solutions: their source, their bytecode, what they do when they are called.
from pathlib import Path

import book.parallel.sharded

folder = Path(book.parallel.sharded.__file__).parent
found = [path for path in folder.rglob("*.pyc")]
found += [name for name in ("data", "sharded", "pipeline") if "import torch" in (folder / f"{name}.py").read_text()]
try:
    book.parallel.sharded.bounds
    book.parallel.sharded.anything()
    found.append("called")
except RuntimeError as error:
    assert "is not available when an exercise is graded" in str(error)
