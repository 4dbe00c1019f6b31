# exercise: 4
# expect: rank 0 issued 1 of 3 all-reduces before the last gradient was ready, 2 can be

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
        for number in range(len(self.flying), len(self.buckets)):
            until_now = [p for bucket in self.buckets[:number + 2] for p in bucket]
            if not self.ready.issuperset(until_now):
                break
            flat = torch.cat([p.grad.flatten() for p in self.buckets[number]])
            self.flying.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for bucket, (flat, work) in zip(self.buckets, self.flying):
            work.wait()
            flat /= dist.get_world_size()
            pieces = flat.split([p.numel() for p in bucket])
            for p, piece in zip(bucket, pieces):
                p.grad.copy_(piece.view_as(p))
        self.ready, self.flying = set(), []
