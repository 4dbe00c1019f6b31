# exercise: 1
# expect: your ranks don't have places of their own

def place_of(rank, shape):
    pp, dp, tp = shape
    return rank // (dp * tp), rank % dp, rank % tp


def groups_of(axis, shape):
    groups = {}
    for rank in range(math.prod(shape)):
        coordinates = list(place_of(rank, shape))
        coordinates[AXES.index(axis)] = None
        groups.setdefault(tuple(coordinates), []).append(rank)
    return list(groups.values())
