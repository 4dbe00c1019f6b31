# exercise: 4
# expect: pass

def grid_groups(columns):
    from torch.distributed.device_mesh import init_device_mesh
    world_size = dist.get_world_size()
    mesh = init_device_mesh(rank_device().type, (world_size // columns, columns), mesh_dim_names=("row", "column"))
    return mesh.get_group("column"), mesh.get_group("row")


def on_grid(partial, gradient, batch, row, column):
    dist.all_reduce(partial, group=row)
    dist.all_reduce(gradient, group=column)
    gradient.div_(column.size())
    dist.broadcast(batch, src=dist.get_global_rank(row, 0), group=row)
