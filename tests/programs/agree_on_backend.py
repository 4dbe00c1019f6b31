"""Under torchrun, on ranks of which some are made to see GPUs: what each of them agrees to.

No GPU is needed: only torch's count of them, and the choice of the current one, are replaced.
"""
import os
import sys
import time

import torch

from book.launch import LaunchError, rank_device


def agree(gpus_by_node, backend, silent_rank):
    num_gpus = int(gpus_by_node.split(",")[int(os.environ["GROUP_RANK"])])
    torch.cuda.device_count = lambda: num_gpus
    torch.cuda.set_device = lambda device: None
    if os.environ["RANK"] == silent_rank:
        time.sleep(8)
        return "was silent"
    try:
        return str(rank_device(backend or None, timeout_s=4 if silent_rank else 60))
    except LaunchError as error:
        return str(error)


if __name__ == "__main__":
    said = agree(*sys.argv[1:4])
    print(f"rank {os.environ['RANK']}: {said}", flush=True)
    time.sleep(1)  # torchrun ends all ranks when one has gone
