# exercise: 2
# expect: pass

def all_gather(out, mine):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out[rank] = mine
    for giver in range(world_size):
        dist.barrier()
        for taker in range(world_size):
            if rank == giver != taker:
                dist.send(mine, taker)
            elif rank == taker != giver:
                dist.recv(out[giver], giver)
