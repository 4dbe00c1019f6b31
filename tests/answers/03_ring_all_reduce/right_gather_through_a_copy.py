# exercise: 2
# expect: pass

def all_gather_step(chunks, step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    outgoing = chunks[(rank + 1 - step) % world_size].clone()
    landing = torch.empty_like(chunks[(rank - step) % world_size])
    receive = dist.irecv(landing, (rank - 1) % world_size)
    dist.isend(outgoing, (rank + 1) % world_size).wait()
    receive.wait()
    chunks[(rank - step) % world_size][:] = landing
