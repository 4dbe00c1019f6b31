# exercise: 1
# expect: rank 0 gives nothing (None) as the output of column_linear

def my_block(tensor, dim):
    size = tensor.shape[dim] // dist.get_world_size()
    return tensor.narrow(dim, dist.get_rank() * size, size)


def column_linear(x_BI, weight_OI, bias_O):
    F.linear(x_BI, my_block(weight_OI, 0), my_block(bias_O, 0))


def row_linear(x_BI, weight_OI, bias_O):
    y_BO = F.linear(x_BI, my_block(weight_OI, 1))
    dist.all_reduce(y_BO)
    return y_BO + bias_O
