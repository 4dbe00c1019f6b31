# exercise: 4
# expect: nothing runs beside backward

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
        pass

    def finish(self):
        for bucket in self.buckets:
            flat = torch.cat([p.grad.flatten() for p in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            pieces = flat.split([p.numel() for p in bucket])
            for p, piece in zip(bucket, pieces):
                p.grad.copy_(piece.view_as(p))
