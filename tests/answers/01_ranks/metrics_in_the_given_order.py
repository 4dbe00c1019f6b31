# exercise: 5
# expect: lacks what rank 1 had, which met another collective

def sum_over_ranks(metrics):
    for tensor in metrics.values():
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
