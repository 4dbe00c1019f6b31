# exercise: 4
# expect: one all-reduce for each of 10 gradients

class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module = module
        broadcast_state(module)
        self.buckets = [[]]
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if sum(q.nbytes for q in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(p)
            p.register_post_accumulate_grad_hook(self.gradient_ready)
        self.ready, self.flying = set(), []

    def forward(self, *inputs):
        return self.module(*inputs)

    def gradient_ready(self, parameter):
        self.flying.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    def finish(self):
        for p, work in self.flying:
            work.wait()
            p.grad /= dist.get_world_size()
        self.flying = []
