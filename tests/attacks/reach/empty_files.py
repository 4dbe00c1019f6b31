# exercise: 1
# ends: a check failed
# needs: warm processes
# right if: made > 100_000

# An empty file has no bytes: its memory is the kernel's, and neither a folder's size nor any process's memory counts it.
import os

made = 0
for folder in ("/tmp", "/dev/shm", os.path.expanduser("~")):
    try:
        for number in range(40_000):
            os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY))
            made += 1
    except OSError:
        pass
