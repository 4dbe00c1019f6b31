# exercise: 2
# expect: where there is one rank alone too

def make_groups(shape):
    mine = {}
    for axis in AXES:
        for ranks in groups_of(axis, shape):
            if len(ranks) == 1:
                continue
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine[axis] = group
    return mine
