# exercise: 5
# expect: pass

def sum_over_ranks(metrics):
    names = [list(metrics)]
    dist.broadcast_object_list(names, src=0, device=rank_device())
    for name in names[0]:
        dist.all_reduce(metrics[name])
