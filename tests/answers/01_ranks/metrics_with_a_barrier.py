# exercise: 5
# expect: A barrier makes the ranks wait for one another, it does not change which call meets which

def sum_over_ranks(metrics):
    for name in metrics:
        dist.barrier()
        dist.all_reduce(metrics[name])
