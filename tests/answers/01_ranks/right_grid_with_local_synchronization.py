# exercise: 4
# expect: pass

def grid_groups(columns):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = rank // columns * columns
    return (dist.new_group(list(range(first, first + columns)), use_local_synchronization=True),
            dist.new_group(list(range(rank % columns, world_size, columns)), use_local_synchronization=True))


def on_grid(partial, gradient, batch, row, column):
    dist.broadcast(batch, min(dist.get_process_group_ranks(row)), group=row)
    gradient.mul_(1 / column.size())
    for tensor, group in ((gradient, column), (partial, row)):
        dist.all_reduce(tensor, group=group)
