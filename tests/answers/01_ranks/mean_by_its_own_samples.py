# exercise: 6
# expect: has divided by its own number of samples

def mean_gradient(gradient, num_samples):
    dist.all_reduce(gradient)
    gradient /= max(num_samples, 1)
