# exercise: 6
# expect: pass

def mean_gradient(gradient, num_samples):
    together = torch.cat([gradient, gradient.new_tensor([num_samples])])
    dist.all_reduce(together)
    gradient.copy_(together[:-1] / together[-1])
