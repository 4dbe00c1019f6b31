# exercise: 6
# expect: rank 2 waits in barrier

def mean_gradient(gradient, num_samples):
    if num_samples == 0:
        dist.barrier()
        return
    total = torch.tensor(float(num_samples), device=gradient.device)
    dist.all_reduce(gradient)
    dist.all_reduce(total)
    gradient /= total
