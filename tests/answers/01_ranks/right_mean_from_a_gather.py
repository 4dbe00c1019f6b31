# exercise: 6
# expect: pass

def mean_gradient(gradient, num_samples):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, num_samples)
    gradient /= sum(counts)
    dist.all_reduce(gradient)
