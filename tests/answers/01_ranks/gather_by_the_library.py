# exercise: 2
# expect: your run called all_gather

def all_gather(out, mine):
    dist.all_gather_into_tensor(out.view(-1), mine)
