# exercise: 6
# expect: 20% are meant to be: p is the probability to drop

class SplitDropout:
    def __init__(self, seed):
        self.shared = torch.Generator().manual_seed(seed)
        self.own = torch.Generator().manual_seed(seed + 1 + dist.get_rank())

    def drop(self, x, p, generator):
        mask = torch.rand(x.shape, generator=generator) < p
        return x * mask / (1 - p)

    def alike(self, x, p):
        return self.drop(x, p, self.shared)

    def apart(self, x, p):
        return self.drop(x, p, self.own)


def count_block(width, mlp_width, num_ranks, num_tokens, element_bytes):
    weights = 4 * width**2 + 2 * width * mlp_width
    biases = 3 * width + mlp_width
    whole = 6 * width
    return (weights + biases) // num_ranks + whole, 4 * num_tokens * width * element_bytes
