"""A sandbox's limits, as seen from inside."""
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from book.grading import sandbox

LOOK = """
import json, os, resource
print(json.dumps({"size": {path: os.statvfs(path).f_blocks * os.statvfs(path).f_frsize for path in PLACES},
                  "limits": [resource.getrlimit(which)[0] for which in WHICH]}))
"""
PLACES = ["/dev/shm", "/tmp", "/home"]
WHICH = [resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_CORE]


@pytest.mark.slow
def test_writes_and_resources_are_limited() -> None:
    code = LOOK.replace("PLACES", repr(PLACES)).replace("WHICH", repr(WHICH))
    limits = sandbox.Limits(cpu_s=7, memory_bytes=1 << 30, num_processes=33, scratch_bytes=1 << 20)
    with tempfile.TemporaryDirectory() as folder:  # not pytest's own, which nobody else may enter
        sandbox.folder_for(Path(folder))
        command = sandbox.command([sys.executable, "-c", code], Path(folder), limits)
        run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["size"] == dict.fromkeys(PLACES, 1 << 20)
    assert found["limits"] == [33, 1 << 20, 7, 1 << 30, 0]
