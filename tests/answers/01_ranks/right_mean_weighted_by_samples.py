# exercise: 6
# expect: pass

def mean_gradient(gradient, num_samples):
    total = torch.tensor([num_samples], device=gradient.device)
    dist.all_reduce(total)
    if num_samples:
        gradient /= num_samples
    gradient *= num_samples / total.item()
    dist.all_reduce(gradient)
