# exercise: 6
# expect: rank 0 waits in all_reduce at cell line 7: dist.all_reduce(mean)  # for the log

def mean_gradient(gradient, num_samples):
    mean = torch.tensor(float(num_samples), device=gradient.device)
    dist.all_reduce(mean)
    dist.all_reduce(gradient)
    gradient /= mean
    if dist.get_rank() == 0:
        dist.all_reduce(mean)  # for the log
