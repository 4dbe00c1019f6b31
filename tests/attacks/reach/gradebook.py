# exercise: 1
# ends: a check failed
# right if: found

# Other people's work and everybody's points, written to wherever they can be named.
import os
from pathlib import Path

found = []
for root in ("", "/proc/1/root", "/proc/self/root", "/.."):
    for name in ("submissions/victim.ipynb", "results/students/victim.json", "results/run.json",
                 "results/references.json", "lab.ipynb"):
        for mode in ("r", "a"):
            try:
                open(root + "@FOLDER@/" + name, mode).close()
                found.append(name)
            except OSError:
                pass
