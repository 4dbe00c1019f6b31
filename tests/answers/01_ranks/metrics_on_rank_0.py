# exercise: 5
# expect: only rank 0 holds the sums: reduce gives them to one rank

def sum_over_ranks(metrics):
    for name in sorted(metrics):
        dist.reduce(metrics[name], 0)
