# exercise: 6
# expect: only rank 0 holds the mean: reduce gives the result to one rank

def mean_gradient(gradient, num_samples):
    total = torch.tensor(float(num_samples), device=gradient.device)
    dist.reduce(gradient, 0)
    dist.reduce(total, 0)
    gradient /= total
