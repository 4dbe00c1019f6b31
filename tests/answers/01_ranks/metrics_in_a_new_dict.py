# exercise: 5
# expect: 'loss' is on every rank as it was before

def sum_over_ranks(metrics):
    metrics = {name: metrics[name].clone() for name in sorted(metrics)}
    for tensor in metrics.values():
        dist.all_reduce(tensor)
    return metrics
