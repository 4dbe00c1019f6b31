# exercise: 6
# expect: pass

def sent_bytes(events):
    rounds = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    return sum(rounds.get(event.op, 0) * (len(event.group) - 1) * (event.num_bytes / len(event.group))
               for event in events if event.kind == "collective")
