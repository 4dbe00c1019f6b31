# exercise: 6
# expect: holds nothing but its own samples: is everything in place, and all-reduced

def mean_gradient(gradient, num_samples):
    total = torch.tensor(float(num_samples), device=gradient.device)
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    dist.all_reduce(total)
    return gradient / total
