# exercise: 1
# expect: column_linear: rank 0 computes the whole product, its share is 1/2

def my_block(tensor, dim):
    size = tensor.shape[dim] // dist.get_world_size()
    return tensor.narrow(dim, dist.get_rank() * size, size)


def column_linear(x_BI, weight_OI, bias_O):
    return my_block(F.linear(x_BI, weight_OI, bias_O), 1)


def row_linear(x_BI, weight_OI, bias_O):
    y_BO = F.linear(x_BI, my_block(weight_OI, 1))
    dist.all_reduce(y_BO)
    return y_BO + bias_O
