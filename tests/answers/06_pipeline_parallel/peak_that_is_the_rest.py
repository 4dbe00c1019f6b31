# exercise: 4
# expect: it is what is left at the end

def bubble_share(trace):
    actions = trace.of_kind("compute")
    step_s = (max(action.end_s for action in actions)
              - min(action.start_s for action in actions))
    busy_s = sum(action.end_s - action.start_s for action in actions)
    return 1 - busy_s / (step_s * trace.world_size)


def peak_in_flight(orders):
    peaks = []
    for order in orders:
        now = peak = 0
        for action in order:
            now += 1 if action.kind == "F" else -1
            peak = max(peak, now)
        peaks.append(now)
    return peaks


def predicted(num_stages, num_micro_batches):
    p, M = num_stages, num_micro_batches
    return {"bubble": (p - 1) / (M + p - 1),
            "gpipe": [M] * p,
            "one_f_one_b": [min(M, p - s) for s in range(p)]}
