# exercise: 3
# expect: your run called all_reduce

def ring_all_reduce(buffer):
    dist.all_reduce(buffer)
