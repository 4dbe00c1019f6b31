# exercise: 1
# expect: pass

def place_of(rank, shape):
    grid = torch.arange(math.prod(shape)).reshape(shape)
    return tuple((grid == rank).nonzero()[0].tolist())


def groups_of(axis, shape):
    grid = torch.arange(math.prod(shape)).reshape(shape)
    number = AXES.index(axis)
    return grid.movedim(number, -1).reshape(-1, shape[number]).tolist()
