# exercise: 6
# expect: that is all ranks together

def sent_bytes(events):
    """Bytes that the rank of these events sends, in rings."""
    total = 0
    for event in events:
        if event.kind == "collective" and event.op != "barrier":
            num_ranks = len(event.group)
            passes = 2 if event.op == "all_reduce" else 1
            total += passes * (num_ranks - 1) / num_ranks * event.num_bytes
    return total * num_ranks
