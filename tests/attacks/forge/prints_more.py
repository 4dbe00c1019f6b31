# exercise: 1
# ends: a check failed

# The right text among a thousand wrong ones.
def chunk_bounds(length, num_chunks):
    size, longer = divmod(length, num_chunks)
    for most in range(num_chunks):
        starts = [chunk * size + min(chunk, most) for chunk in range(num_chunks + 1)]
        print("bounds:", list(zip(starts, starts[1:])), end="\r")
        print("\b" * 1000, end="")
    return []
