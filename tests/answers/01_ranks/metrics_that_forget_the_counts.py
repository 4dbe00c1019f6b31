# exercise: 5
# expect: 'seen' is on every rank as it was before

def sum_over_ranks(metrics):
    dist.all_reduce(metrics[min(metrics)])
