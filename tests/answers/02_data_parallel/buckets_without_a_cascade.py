# exercise: 4
# expect: when bucket 0 starts, later ones that are full must start too

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
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.flying):][:1]:
            if not self.ready.issuperset(bucket):
                break
            flat = torch.cat([p.grad.flatten() for p in bucket])
            self.flying.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for bucket, (flat, work) in zip(self.buckets, self.flying):
            work.wait()
            mean = flat / dist.get_world_size()
            pieces = mean.split([p.numel() for p in bucket])
            for p, piece in zip(bucket, pieces):
                p.grad.copy_(piece.view_as(p))
        self.ready, self.flying = set(), []
