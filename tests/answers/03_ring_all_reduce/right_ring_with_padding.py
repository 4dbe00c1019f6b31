# exercise: 3
# expect: pass

def ring_all_reduce(buffer):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = -(-len(buffer) // world_size)
    padded = torch.zeros(size * world_size, dtype=buffer.dtype, device=buffer.device)
    padded[:len(buffer)] = buffer
    table = padded.view(world_size, size)
    for step in range(world_size - 1):
        reduce_scatter_step(table, step)
    for step in range(world_size - 1):
        all_gather_step(table, step)
    buffer.copy_(padded[:len(buffer)])
