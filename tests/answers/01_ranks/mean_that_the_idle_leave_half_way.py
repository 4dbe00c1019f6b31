# exercise: 6
# expect: waits in all_reduce at cell line 6: dist.all_reduce(total)

def mean_gradient(gradient, num_samples):
    dist.all_reduce(gradient)
    if num_samples == 0:
        return
    total = torch.tensor(float(num_samples), device=gradient.device)
    dist.all_reduce(total)
    gradient /= total
