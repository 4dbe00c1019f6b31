# exercise: 3
# expect: pass

def shard(linear, dim):
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    parts = linear.weight.detach().chunk(num_ranks, dim)
    biases = linear.bias.detach().chunk(num_ranks) if dim == 0 else [linear.bias.detach()] * num_ranks
    part = nn.Linear(parts[rank].shape[1], parts[rank].shape[0], device=parts[rank].device, dtype=parts[rank].dtype)
    part.load_state_dict({"weight": parts[rank], "bias": biases[rank]})
    return part


class SplitMLP(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        for tensor in mlp.state_dict().values():
            dist.broadcast(tensor, src=0)
        self.up, self.down = shard(mlp.up, 0), shard(mlp.down, 1)

    def forward(self, x_BTD):
        y_BTD = F.gelu(self.up(identity_then_all_reduce(x_BTD))) @ self.down.weight.T
        return self.down.bias + all_reduce_then_identity(y_BTD)
