# exercise: 4
# expect: waits in new_group

def grid_groups(columns):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = rank // columns * columns
    row = dist.new_group(list(range(first, first + columns)))
    column = dist.new_group(list(range(rank % columns, world_size, columns)))
    return row, column


def on_grid(partial, gradient, batch, row, column):
    dist.all_reduce(partial, group=row)
    dist.all_reduce(gradient, group=column)
    gradient /= dist.get_world_size(column)
    dist.broadcast(batch, group_src=0, group=row)
