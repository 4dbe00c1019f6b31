# exercise: 1
# expect: all of them are asked for

def place_of(rank, shape):
    _, dp, tp = shape
    return rank // (dp * tp), rank // tp % dp, rank % tp


def groups_of(axis, shape):
    groups = {}
    for rank in range(math.prod(shape)):
        coordinates = list(place_of(rank, shape))
        coordinates[AXES.index(axis)] = None
        groups.setdefault(tuple(coordinates), []).append(rank)
    return list(groups.values())[:1]
