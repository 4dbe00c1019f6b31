# exercise: 4
# expect: in a group that it belongs to, and in place

def grid_groups(columns):
    world_size = dist.get_world_size()
    for first in range(0, world_size, columns):
        row = dist.new_group(list(range(first, first + columns)))
    for first in range(columns):
        column = dist.new_group(list(range(first, world_size, columns)))
    return row, column


def on_grid(partial, gradient, batch, row, column):
    dist.all_reduce(partial, group=row)
    dist.all_reduce(gradient, group=column)
    gradient /= max(dist.get_world_size(column), 1)
    if dist.get_rank(row) >= 0:
        dist.broadcast(batch, group_src=0, group=row)
