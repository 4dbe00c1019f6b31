"""Two ranks, by a launcher or by mp.spawn, that leave their process ids in the folder PIDS and then wait for ever."""
import os
import time
from pathlib import Path


def wait(*_):
    pid = os.getpid()
    Path(os.environ["PIDS"], str(pid)).touch()
    time.sleep(600)


if __name__ == "__main__":
    if "RANK" in os.environ:
        wait()
    else:
        import torch.multiprocessing as mp  # here: a rank of the launcher needs no torch to wait

        mp.spawn(wait, nprocs=2)
