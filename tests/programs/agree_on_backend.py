"""Under torchrun, on ranks of which some are made to see GPUs: what each of them agrees to, at each start.

    torchrun ... agree_on_backend.py GPUS [BACKEND SILENT [DIES FOLDER]]

Each host sees as many GPUs as GPUS says ("2,0"), at its second start as it says after a semicolon ("2,0;2,2"). Rank
SILENT does not answer. At the first start rank DIES ends itself when all have their devices, or with "agent 2" rank 2
ends its agent too. A file in FOLDER tells the starts apart. No GPU is needed: only torch's count of them, and the
choice of the current one, are replaced.
"""
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from book.launch import LaunchError, rank_device

RANK, WORLD_SIZE, HOST = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"))


def agree(gpus_by_host, backend, silent):
    num_gpus = int(gpus_by_host.split(",")[int(HOST)])
    torch.cuda.device_count = lambda: num_gpus
    torch.cuda.set_device = lambda device: None
    if silent == RANK:
        time.sleep(8)
        return "was silent"
    try:
        device = rank_device(backend or None, timeout_s=4 if silent else 60)
    except LaunchError as error:
        return str(error)
    assert rank_device() == device
    return str(device)


def first_start(dies):
    """One rank ends; torchrun ends the others, or those of other agents fail for want of it."""
    if dies.split()[-1] == RANK:
        time.sleep(1)  # the others have their devices by now
        if dies.startswith("agent"):
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(4 if dies.startswith("agent") else 60)
    sys.exit(1)


def main(gpus, backend="", silent="", dies="", folder=""):
    starts, mark = gpus.split(";"), Path(folder, f"started{RANK}")
    again = bool(dies) and mark.exists()
    if dies:
        mark.touch()
    said = agree(starts[again], backend, silent)
    print(f"start {int(again)}, rank {RANK} of {WORLD_SIZE}: {said}\n", end="", flush=True)
    if dies and not again:
        first_start(dies)
    if said == "cpu":
        dist.init_process_group()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == int(WORLD_SIZE)
    time.sleep(1)  # torchrun ends all ranks when one has gone


if __name__ == "__main__":
    main(*sys.argv[1:])
