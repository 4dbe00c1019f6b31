"""Under torchrun: a recorded ring, an all-reduce and an executed schedule; each rank saves its recording."""
import sys

import torch
import torch.distributed as dist

from book import record
from book.collectives import ring_all_reduce
from book.execute import execute

if __name__ == "__main__":
    record.start()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer = torch.full((1000,), float(rank))
    for _ in range(3):
        incoming = torch.empty_like(buffer)
        requests = [dist.irecv(incoming, (rank - 1) % size), dist.isend(buffer, (rank + 1) % size)]
        for request in requests:
            request.wait()
        buffer = buffer + incoming
    dist.all_reduce(buffer)
    execute(ring_all_reduce(size), torch.ones(1000))
    record.save(f"{sys.argv[1]}/{rank}.json")
    dist.destroy_process_group()
