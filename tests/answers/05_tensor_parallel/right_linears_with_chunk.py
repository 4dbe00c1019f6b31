# exercise: 1
# expect: pass

def my_block(tensor, dim):
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def column_linear(x_BI, weight_OI, bias_O):
    return F.linear(x_BI, my_block(weight_OI, 0), my_block(bias_O, 0))


def row_linear(x_BI, weight_OI, bias_O):
    y_BO = F.linear(x_BI, my_block(weight_OI, 1))
    dist.all_reduce(y_BO)
    return y_BO + bias_O
