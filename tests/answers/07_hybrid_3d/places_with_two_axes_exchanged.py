# exercise: 1
# expect: dp and pp are exchanged

def place_of(rank, shape):
    pp, dp, tp = shape
    rest, place = divmod(rank, tp)
    replica, stage = divmod(rest, pp)
    return stage, replica, place


def groups_of(axis, shape):
    groups = {}
    for rank in range(math.prod(shape)):
        coordinates = list(place_of(rank, shape))
        coordinates[AXES.index(axis)] = None
        groups.setdefault(tuple(coordinates), []).append(rank)
    return list(groups.values())
