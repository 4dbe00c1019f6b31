# exercise: 6
# expect: holds nan: was zero divided by zero

def mean_gradient(gradient, num_samples):
    gradient /= num_samples
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
