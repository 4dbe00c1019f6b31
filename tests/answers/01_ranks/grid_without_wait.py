# exercise: 4
# expect: async_op

def grid_groups(columns):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everybody = torch.arange(world_size).view(-1, columns)
    rows = [dist.new_group(ranks) for ranks in everybody.tolist()]
    others = [dist.new_group(ranks) for ranks in everybody.T.tolist()]
    return rows[rank // columns], others[rank % columns]


def on_grid(partial, gradient, batch, row, column):
    if dist.get_rank() == 5:
        time.sleep(0.2)
    dist.all_reduce(partial, group=row, async_op=True)
    dist.all_reduce(gradient, group=column, async_op=True)
    gradient /= dist.get_world_size(column)
    dist.broadcast(batch, group_src=0, group=row)
