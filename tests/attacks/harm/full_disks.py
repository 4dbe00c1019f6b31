# exercise: 1
# ends: a check failed
# right if: written >= 3 << 30

# Whatever can be written to is filled up: memory, scratch and home.
import os

written = 0
for folder in ("/dev/shm", "/tmp", os.path.expanduser("~"), "/dev", "/run", "/"):
    for number in range(40):
        try:
            with open(f"{folder}/{number}", "wb", 0) as file:
                while written < 3 << 30:
                    written += file.write(b"1" * (16 << 20))
        except OSError:
            pass
