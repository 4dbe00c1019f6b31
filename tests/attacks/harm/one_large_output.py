# exercise: 1
# ends:

# One output of 300 million characters.
def chunk_bounds(length, num_chunks):
    print("x" * (300 << 20))
    return []
