# exercise: 6
# expect: rank 2 had no samples and holds zeros: it needs the mean as much as the others

def mean_gradient(gradient, num_samples):
    summed = gradient.clone()
    total = torch.tensor(float(num_samples), device=gradient.device)
    dist.all_reduce(summed)
    dist.all_reduce(total)
    if num_samples:
        gradient.copy_(summed / total)
