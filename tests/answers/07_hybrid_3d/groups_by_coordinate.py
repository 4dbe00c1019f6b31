# exercise: 1
# expect: ranks, one for each pp coordinate

def place_of(rank, shape):
    _, dp, tp = shape
    return rank // (dp * tp), rank // tp % dp, rank % tp


def groups_of(axis, shape):
    groups = {}
    for rank in range(math.prod(shape)):
        own = place_of(rank, shape)[AXES.index(axis)]
        groups.setdefault(own, []).append(rank)
    return list(groups.values())
