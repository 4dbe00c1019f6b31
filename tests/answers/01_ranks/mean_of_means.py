# exercise: 6
# expect: holds the mean of the ranks' means, which counts a sample of a small shard more

def mean_gradient(gradient, num_samples):
    if num_samples:
        gradient /= num_samples
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
