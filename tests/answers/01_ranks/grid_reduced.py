# exercise: 4
# expect: `partial` is right on the first rank of each row alone: reduce gives

def grid_groups(columns):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everybody = torch.arange(world_size).view(-1, columns)
    rows = [dist.new_group(ranks) for ranks in everybody.tolist()]
    others = [dist.new_group(ranks) for ranks in everybody.T.tolist()]
    return rows[rank // columns], others[rank % columns]


def on_grid(partial, gradient, batch, row, column):
    dist.reduce(partial, group_dst=0, group=row)
    dist.reduce(gradient, group_dst=0, group=column)
    gradient /= dist.get_world_size(column)
    dist.broadcast(batch, group_src=0, group=row)
