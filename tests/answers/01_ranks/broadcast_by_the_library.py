# exercise: 1
# expect: your run called broadcast

def broadcast(buffer, root):
    dist.broadcast(buffer, root)
