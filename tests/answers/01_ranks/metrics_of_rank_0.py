# exercise: 5
# expect: 'loss' is on every rank what rank 0 had: a broadcast copies, it does not add

def sum_over_ranks(metrics):
    for name in sorted(metrics):
        dist.broadcast(metrics[name], 0)
