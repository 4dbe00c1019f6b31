# exercise: 2
# expect: rank 1's chunk never arrived

def all_gather_step(chunks, step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(chunks[0])
    send = dist.isend(chunks[(rank + 1) % world_size], (rank + 1) % world_size)
    incoming = torch.empty_like(chunks[rank])
    dist.recv(incoming, (rank - 1) % world_size)
    send.wait()
    chunks[rank].copy_(incoming)
