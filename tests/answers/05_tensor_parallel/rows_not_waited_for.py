# exercise: 1
# expect: rank 0 issued 2 collectives and never waited for 1 of them

def my_block(tensor, dim):
    size = tensor.shape[dim] // dist.get_world_size()
    return tensor.narrow(dim, dist.get_rank() * size, size)


def column_linear(x_BI, weight_OI, bias_O):
    return F.linear(x_BI, my_block(weight_OI, 0), my_block(bias_O, 0))


def row_linear(x_BI, weight_OI, bias_O):
    y_BO = F.linear(x_BI, my_block(weight_OI, 1))
    dist.all_reduce(y_BO, async_op=True)
    return y_BO + bias_O
