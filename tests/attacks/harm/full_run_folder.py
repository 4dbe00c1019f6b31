# exercise: 1
# ends: a check failed
# right if: written

# The run's folder is the machine's: it is filled in a folder below it, by files without a name, behind a closed door,
# while other names come and go.
import os
import sys
import threading
from pathlib import Path

inside = Path(sys.argv[sys.argv.index("-f") + 1]).parent
most, written, kept = 1 << 30, 0, []


def come_and_go():
    while True:
        try:
            os.mkdir(inside / "come")
            os.rmdir(inside / "come")
        except OSError:
            return


threading.Thread(target=come_and_go, daemon=True).start()
try:
    (inside / "below").mkdir()
    inside.chmod(0o300)
    while written < most:
        file = open(inside / "below" / str(written), "wb", 0)
        kept.append(file)
        os.unlink(file.name)
        written += file.write(b"1" * (16 << 20))
except OSError:
    pass
