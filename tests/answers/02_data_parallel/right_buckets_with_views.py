# exercise: 4
# expect: pass

class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module = module
        broadcast_state(module)
        self.buckets, self.flats, self.works, self.ready = [[]], [], [], set()
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if sum(q.nbytes for q in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(p)
            p.register_post_accumulate_grad_hook(self.gradient_ready)
        for bucket in self.buckets:
            like = bucket[0]
            self.flats.append(torch.zeros(sum(p.numel() for p in bucket), dtype=like.dtype, device=like.device))

    def forward(self, *inputs):
        return self.module(*inputs)

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        while len(self.works) < len(self.buckets) and self.ready.issuperset(self.buckets[len(self.works)]):
            flat, start = self.flats[len(self.works)], 0
            for p in self.buckets[len(self.works)]:
                flat[start:start + p.numel()] = p.grad.flatten()
                p.grad = flat[start:start + p.numel()].view_as(p)
                start += p.numel()
            self.works.append(dist.all_reduce(flat, async_op=True))

    def finish(self):
        for flat, work in zip(self.flats, self.works):
            work.wait()
            flat /= dist.get_world_size()
        self.works, self.ready = [], set()
