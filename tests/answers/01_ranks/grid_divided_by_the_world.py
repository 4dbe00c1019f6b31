# exercise: 4
# expect: `gradient` is the sum over its column (ranks 0, 3) times 0.166667

def grid_groups(columns):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everybody = torch.arange(world_size).view(-1, columns)
    rows = [dist.new_group(ranks) for ranks in everybody.tolist()]
    others = [dist.new_group(ranks) for ranks in everybody.T.tolist()]
    return rows[rank // columns], others[rank % columns]


def on_grid(partial, gradient, batch, row, column):
    dist.all_reduce(partial, group=row)
    dist.all_reduce(gradient, group=column)
    gradient /= dist.get_world_size()
    dist.broadcast(batch, group_src=0, group=row)
