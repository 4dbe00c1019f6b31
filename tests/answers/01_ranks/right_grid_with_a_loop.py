# exercise: 4
# expect: pass

def grid_groups(columns):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for first in range(0, world_size, columns):
        members = list(range(first, first + columns))
        group = dist.new_group(members)
        if rank in members:
            row = group
    for first in range(columns):
        members = list(range(first, world_size, columns))
        group = dist.new_group(members)
        if rank in members:
            column = group
    return row, column


def on_grid(partial, gradient, batch, row, column):
    pieces = [torch.empty_like(partial) for _ in range(row.size())]
    dist.all_gather(pieces, partial, group=row)
    partial.copy_(torch.stack(pieces).sum(dim=0))
    dist.all_reduce(gradient, op=dist.ReduceOp.SUM, group=column)
    gradient /= column.size()
    dist.broadcast(batch, group_src=0, group=row)
