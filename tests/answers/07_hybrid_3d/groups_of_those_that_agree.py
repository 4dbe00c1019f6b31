# exercise: 1
# expect: the ranks of a group differ in their

def place_of(rank, shape):
    _, dp, tp = shape
    return rank // (dp * tp), rank // tp % dp, rank % tp


def groups_of(axis, shape):
    axis = {"pp": "dp", "dp": "pp", "tp": "tp"}[axis]
    groups = {}
    for rank in range(math.prod(shape)):
        coordinates = list(place_of(rank, shape))
        coordinates[AXES.index(axis)] = None
        groups.setdefault(tuple(coordinates), []).append(rank)
    return list(groups.values())
