# exercise: 2
# expect: the order in which a rank makes the groups must not depend on the rank

def make_groups(shape):
    """This rank's process group on each axis: {"pp": ..., "dp": ..., ...}."""
    mine = {}
    for axis in AXES:
        groups = groups_of(axis, shape)
        for ranks in groups if dist.get_rank() % 2 else groups[::-1]:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine[axis] = group
    return mine
