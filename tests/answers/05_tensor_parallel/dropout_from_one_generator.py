# exercise: 6
# expect: until one of them drew more numbers

class SplitDropout:
    def __init__(self, seed):
        self.shared = torch.Generator().manual_seed(seed)
        self.own = torch.Generator().manual_seed(seed + 1 + dist.get_rank())

    def drop(self, x, p, generator):
        mask = torch.rand(x.shape, generator=generator) >= p
        return x * mask / (1 - p)

    def alike(self, x, p):
        return self.drop(x, p, self.shared)

    def apart(self, x, p):
        everyones = torch.ones(dist.get_world_size(), *x.shape)
        return x * self.drop(everyones, p, self.shared)[dist.get_rank()]


def count_block(width, mlp_width, num_ranks, num_tokens, element_bytes):
    weights = 4 * width**2 + 2 * width * mlp_width
    biases = 3 * width + mlp_width
    whole = 6 * width
    return (weights + biases) // num_ranks + whole, 4 * num_tokens * width * element_bytes
