# exercise: 2
# expect: each makes only the groups that it is in

def make_groups(shape):
    mine = {}
    for axis in AXES:
        for ranks in groups_of(axis, shape):
            if dist.get_rank() in ranks:
                mine[axis] = dist.new_group(ranks)
    return mine
