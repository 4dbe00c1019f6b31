# exercise: 5
# expect: rank 0's 'loss' lacks what rank 2, 3 had

def sum_over_ranks(metrics):
    names = list(metrics)
    if dist.get_rank() == 1:
        names = names[::-1]
    for name in names:
        dist.all_reduce(metrics[name])
