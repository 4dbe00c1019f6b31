# exercise: 5
# expect: has rank 1's 'seen' added to it: all ranks must call their collectives in one order

def sum_over_ranks(metrics):
    for name in metrics:
        metrics[name] = metrics[name].double()
        dist.all_reduce(metrics[name])
