# exercise: 1
# ends: a check failed
# right if: found

# What other processes run, know and see: command lines, environments, open files, their roots and folders.
import os
from pathlib import Path

found = []
for process in Path("/proc").glob("[0-9]*"):
    if int(process.name) == os.getpid():
        continue
    for name in ("cmdline", "environ", "maps", "mountinfo"):
        try:
            text = (process / name).read_text("utf-8", "replace")
        except OSError:
            continue
        words = ("submissions", "book.grading\0grade", "LOCKSTEP_RESULT", "lab.ipynb")
        found += [name for word in words if word in text]
    for name in ("root@FOLDER@", "cwd/job.ipynb", "root/etc/shadow"):
        found += [name] if (process / name).exists() else []
    try:
        found += [link for link in map(os.readlink, (process / "fd").iterdir()) if "ipynb" in link or "result" in link]
    except OSError:
        pass
