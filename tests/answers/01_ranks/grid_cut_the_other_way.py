# exercise: 4
# expect: rank 0's `partial` is the sum over ranks 0, 2, 4, and must be the sum over its row

def grid_groups(columns):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_rows = world_size // columns
    rows = [dist.new_group(list(range(first, world_size, num_rows))) for first in range(num_rows)]
    others = [dist.new_group(list(range(first, first + num_rows))) for first in range(0, world_size, num_rows)]
    return rows[rank % num_rows], others[rank // num_rows]


def on_grid(partial, gradient, batch, row, column):
    dist.all_reduce(partial, group=row)
    dist.all_reduce(gradient, group=column)
    gradient /= dist.get_world_size(column)
    dist.broadcast(batch, group_src=0, group=row)
