# exercise: 5
# expect: rank 0's 'loss' is as it was before, and others' is not

def sum_over_ranks(metrics):
    names = sorted(metrics, reverse=dist.get_rank() == 0)
    for name in names:
        dist.all_reduce(metrics[name])
