# exercise: 2
# expect: pass

def make_groups(shape):
    return {axis: dist.new_group(next(ranks for ranks in groups_of(axis, shape)
                                      if dist.get_rank() in ranks),
                                 use_local_synchronization=True)
            for axis in AXES}
