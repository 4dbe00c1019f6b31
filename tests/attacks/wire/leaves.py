# exercise: 1
# ends: stopped: the ranks were not done

# A rank that ends while others wait for it.
import os


def ring_all_reduce(buffer):
    if dist.get_backend() == "wire":
        os._exit(0)
    dist.all_reduce(buffer)
