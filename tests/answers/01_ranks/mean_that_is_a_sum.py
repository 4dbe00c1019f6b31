# exercise: 6
# expect: holds the sum: divide by the number of samples of all ranks

def mean_gradient(gradient, num_samples):
    dist.all_reduce(gradient)
