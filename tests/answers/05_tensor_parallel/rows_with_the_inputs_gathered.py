# exercise: 1
# expect: row_linear, rank 0: your code calls all_gather

def my_block(tensor, dim):
    size = tensor.shape[dim] // dist.get_world_size()
    return tensor.narrow(dim, dist.get_rank() * size, size)


def column_linear(x_BI, weight_OI, bias_O):
    return F.linear(x_BI, my_block(weight_OI, 0), my_block(bias_O, 0))


def row_linear(x_BI, weight_OI, bias_O):
    parts = [torch.empty_like(x_BI) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x_BI)
    return F.linear(torch.cat(parts, dim=1), weight_OI, bias_O)
