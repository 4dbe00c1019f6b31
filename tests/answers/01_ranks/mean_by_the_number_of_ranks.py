# exercise: 6
# expect: has divided by the number of ranks: they have different numbers of samples

def mean_gradient(gradient, num_samples):
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
