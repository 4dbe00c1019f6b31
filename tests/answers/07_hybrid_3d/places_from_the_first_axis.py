# exercise: 1
# expect: your neighbouring ranks are neighbours along pp

def place_of(rank, shape):
    pp, dp, tp = shape
    rest, stage = divmod(rank, pp)
    place, replica = divmod(rest, dp)
    return stage, replica, place


def groups_of(axis, shape):
    groups = {}
    for rank in range(math.prod(shape)):
        coordinates = list(place_of(rank, shape))
        coordinates[AXES.index(axis)] = None
        groups.setdefault(tuple(coordinates), []).append(rank)
    return list(groups.values())
