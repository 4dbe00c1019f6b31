# exercise: 1
# ends: a check failed
# right if: found

# A report of the attacker's own, in the run's folder and wherever else one may be looked for.
import json
import os
import sys
from pathlib import Path

inside = Path(sys.argv[sys.argv.index("-f") + 1]).parent if "-f" in sys.argv else Path("/tmp")
cells = [{"id": name, "kind": "check", "ok": True, "outcome": "passed", "message": "", "traceback": "", "outputs": [],
          "seconds": 0.1} for name in ("check-1", "hidden-1")]
found = [name for name in ("job.ipynb", "result.json", "log") if (inside.parent / name).exists()]
for folder in (inside.parent, inside, inside.parent.parent, Path.cwd(), Path.home(), Path("/"), Path("/tmp")):
    for name in ("result.json", "result.json.part", "log", "job.ipynb"):
        try:
            (folder / name).write_text(json.dumps({"cells": cells, "exit": 0}))
        except OSError:
            pass
for name in ("../result.json", "result.json"):
    try:
        os.symlink(inside.parent / "result.json", inside / name.replace("/", "_"))
    except OSError:
        pass
