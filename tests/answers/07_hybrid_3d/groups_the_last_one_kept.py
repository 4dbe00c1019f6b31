# exercise: 2
# expect: that it is not in: keep the one whose ranks

def make_groups(shape):
    return {axis: [dist.new_group(ranks) for ranks in groups_of(axis, shape)][-1]
            for axis in AXES}
