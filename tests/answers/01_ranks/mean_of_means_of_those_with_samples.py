# exercise: 6
# expect: over the ranks that have samples: it still counts a sample of a small shard

def mean_gradient(gradient, num_samples):
    busy = torch.tensor(float(num_samples > 0), device=gradient.device)
    gradient /= max(num_samples, 1)
    dist.all_reduce(gradient)
    dist.all_reduce(busy)
    gradient /= busy
