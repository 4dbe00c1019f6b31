# exercise: 1
# expect: these are columns 0, 2, 4, 6: neighbours belong together

def my_block(tensor, dim):
    places = torch.arange(dist.get_rank(), tensor.shape[dim], dist.get_world_size())
    return tensor.index_select(dim, places.to(tensor.device))


def column_linear(x_BI, weight_OI, bias_O):
    return F.linear(x_BI, my_block(weight_OI, 0), my_block(bias_O, 0))


def row_linear(x_BI, weight_OI, bias_O):
    y_BO = F.linear(x_BI, my_block(weight_OI, 1))
    dist.all_reduce(y_BO)
    return y_BO + bias_O
