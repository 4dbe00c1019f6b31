# exercise: 1
# expect: a part of a rank is a rank more

def held_bytes(num_parameters, stage, num_ranks, each):
    """Bytes of parameters, gradients and optimizer state on one rank."""
    return tuple(num_parameters * size / (num_ranks if stage >= first else 1)
                 for first, size in zip((3, 2, 1), each))


def fewest_ranks(num_parameters, stage, each, limit_bytes):
    """The fewest ranks on which no rank keeps more; None if none will do."""
    whole = sum(held_bytes(num_parameters, stage, math.inf, each))
    shared = num_parameters * sum(each) - whole
    if whole + shared <= limit_bytes:
        return 1
    if whole >= limit_bytes:
        return None
    return int(shared // (limit_bytes - whole))
