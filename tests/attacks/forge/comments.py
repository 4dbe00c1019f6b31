# exercise: 1
# ends: a check failed

# Comments that nbval obeys, in a cell of the learner's.
# NBVAL_SKIP
# NBVAL_IGNORE_OUTPUT
# NBVAL_RAISES_EXCEPTION
def chunk_bounds(length, num_chunks):
    return [(0, 0)] * (num_chunks - 1) + [(0, length)]
