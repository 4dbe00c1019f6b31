"""Two replicas of two stages for torchrun on four ranks; each driver prints whether it matches one process."""
from tests.test_parallel_remote import matches, train

driven = train(2, 2)
if driven is not None:
    print("matches one process:", matches(driven))
