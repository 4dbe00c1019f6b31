# exercise: 4
# expect: pass

def ring_cost(num_bytes, world_size):
    rounds = sum(1 for half in range(2) for step in range(1, world_size))
    return rounds, rounds * (num_bytes // world_size)
