# exercise: 5
# expect: KeyError: 'seen'

def sum_over_ranks(metrics):
    for name in ("seen", "loss"):
        dist.all_reduce(metrics[name], op=dist.ReduceOp.SUM)
