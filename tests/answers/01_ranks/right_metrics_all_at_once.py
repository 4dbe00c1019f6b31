# exercise: 5
# expect: pass

def sum_over_ranks(metrics):
    pairs = sorted(metrics.items(), key=lambda item: item[0])
    requests = [dist.all_reduce(values, async_op=True) for _, values in pairs]
    for request in requests:
        request.wait()
