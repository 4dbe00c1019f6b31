# exercise: 2
# expect: every buffer is as it was before

def all_gather_step(chunks, step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(chunks[(rank - step) % world_size])
    send = dist.isend(chunks[(rank + 1 - step) % world_size], (rank + 1) % world_size)
    dist.recv(incoming, (rank - 1) % world_size)
    send.wait()
    chunks = list(chunks)
    chunks[(rank - step) % world_size] = incoming
