# exercise: 5
# expect: 'loss' is the mean, and the sum is asked for

def sum_over_ranks(metrics):
    for name in sorted(metrics):
        dist.all_reduce(metrics[name])
        metrics[name] = metrics[name] / dist.get_world_size()
