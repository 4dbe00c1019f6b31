# exercise: 1
# expect: pass

def held_bytes(num_parameters, stage, num_ranks, each):
    shared = {0: (), 1: (2,), 2: (1, 2), 3: (0, 1, 2)}[stage]
    return [num_parameters * each[i] / (num_ranks if i in shared else 1) for i in range(3)]


def fewest_ranks(num_parameters, stage, each, limit_bytes):
    for num_ranks in range(1, 100_000):
        if sum(held_bytes(num_parameters, stage, num_ranks, each)) <= limit_bytes:
            return num_ranks
