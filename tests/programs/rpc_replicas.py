"""Two replicas of two stages for torchrun on four ranks; each driver prints whether it matches one process."""
import sys

from tests.test_parallel_remote import matches, train

driven = train(2, 2)
if driven is not None:
    # One write: two drivers share torchrun's stdout, and what print writes in pieces can land inside the other's line.
    sys.stdout.write(f"matches one process: {matches(driven)}\n")
