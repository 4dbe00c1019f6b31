# exercise: 6
# expect: holds the sum of the ranks' means, divided by the number of all samples

def mean_gradient(gradient, num_samples):
    if num_samples:
        gradient /= num_samples
    total = torch.tensor(float(num_samples), device=gradient.device)
    dist.all_reduce(gradient)
    dist.all_reduce(total)
    gradient /= total
