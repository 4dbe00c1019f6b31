# exercise: 1
# ends:

# Text without end.
def chunk_bounds(length, num_chunks):
    while True:
        print("x" * (1 << 20), flush=True)
