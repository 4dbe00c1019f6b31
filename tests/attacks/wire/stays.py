# exercise: 1
# ends: stopped: the ranks were not done

# A rank that says nothing, and does not mind that the broker is gone.
import time


def ring_all_reduce(buffer):
    while dist.get_backend() == "wire":
        time.sleep(1)
    dist.all_reduce(buffer)
