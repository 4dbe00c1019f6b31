"""A script without a `__main__` guard whose ranks never finish; prints a line once they all run."""
import subprocess
import sys

import torch.distributed as dist

from book.launch import launch

print("started", flush=True)


def wait():
    dist.init_process_group()
    dist.barrier()
    print("running", flush=True)
    if dist.get_rank() == 0:
        subprocess.run(["sleep", "600"])
    dist.barrier()


launch(wait, 3, timeout_s=600, on_line=lambda rank, line: print(rank, line, file=sys.stdout, flush=True))
