# exercise: 5
# expect: rank 0's 'loss' lacks what rank 1 had

def sum_over_ranks(metrics):
    for name in set(metrics):
        dist.all_reduce(metrics[name])
