# exercise: 5
# expect: pass

def sum_over_ranks(metrics):
    names = sorted(metrics)
    together = torch.stack([metrics[name].double() for name in names])
    dist.all_reduce(together)
    for name, row in zip(names, together):
        metrics[name] = row.to(metrics[name].dtype)
