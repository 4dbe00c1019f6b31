# exercise: 1
# expect: this is block 0 of the columns, which belongs to rank 0

def my_block(tensor, dim):
    return tensor.narrow(dim, 0, tensor.shape[dim] // dist.get_world_size())


def column_linear(x_BI, weight_OI, bias_O):
    return F.linear(x_BI, my_block(weight_OI, 0), my_block(bias_O, 0))


def row_linear(x_BI, weight_OI, bias_O):
    y_BO = F.linear(x_BI, my_block(weight_OI, 1))
    dist.all_reduce(y_BO)
    return y_BO + bias_O
