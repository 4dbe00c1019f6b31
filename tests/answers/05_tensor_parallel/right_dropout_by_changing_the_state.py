# exercise: 6
# expect: pass

class SplitDropout:
    def __init__(self, seed):
        self.states = {}
        for name, start in (("alike", seed), ("apart", 7919 * (dist.get_rank() + 1) + seed)):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(start)
                self.states[name] = torch.get_rng_state()

    def drop(self, x, p, name):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.states[name])
            mask = F.dropout(torch.ones(x.shape, dtype=x.dtype), p)
            self.states[name] = torch.get_rng_state()
        return x * mask

    def alike(self, x, p):
        return self.drop(x, p, "alike")

    def apart(self, x, p):
        return self.drop(x, p, "apart")


def count_block(width, mlp_width, num_ranks, num_tokens, element_bytes):
    attention = 4 * width * width // num_ranks + 3 * width // num_ranks + width
    mlp = (2 * width + 1) * mlp_width // num_ranks + width
    return 4 * width + attention + mlp, 2 * 2 * num_tokens * width * element_bytes
