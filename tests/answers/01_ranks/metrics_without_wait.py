# exercise: 5
# expect: waited for

def sum_over_ranks(metrics):
    for name in sorted(metrics):
        if dist.get_rank() == 1:
            time.sleep(0.1)
        dist.all_reduce(metrics[name], async_op=True)
