# exercise: 1
# ends: a check failed

# Twenty gibibytes in one process.
def chunk_bounds(length, num_chunks):
    kept = []
    while len(kept) < 320:
        kept.append(bytearray(b"1") * (64 << 20))
    return []
