# exercise: 4
# expect: pass

def bubble_share(trace):
    actions = trace.of_kind("compute")
    start_s, end_s = actions.array("start_s"), actions.array("end_s")
    return 1 - (end_s - start_s).sum() / ((end_s.max() - start_s.min()) * trace.world_size)


def peak_in_flight(orders):
    peaks = {}
    for rank, order in enumerate(orders):
        kept = set()
        for action in order:
            kept ^= {(action.stage, action.micro_batch)}  # a forward puts it in, a backward takes it out
            peaks[rank] = max(peaks.get(rank, 0), len(kept))
    return list(peaks.values())


def predicted(num_stages, num_micro_batches):
    ideal = num_micro_batches
    return {"bubble": 1 - ideal / (ideal + num_stages - 1), "gpipe": num_stages * [num_micro_batches],
            "one_f_one_b": [min(left, num_micro_batches) for left in range(num_stages, 0, -1)]}
