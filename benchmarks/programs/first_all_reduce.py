"""What ranks do in every launch that is compared: join the group, all-reduce once. As a program: a torchrun rank."""
import torch
import torch.distributed as dist


def first_all_reduce() -> float:
    """All-reduce a one from each rank; returns the sum, and raises if it is not the number of ranks."""
    dist.init_process_group("gloo")  # named, so that a machine with GPUs measures the same thing
    total = torch.ones(1)
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    if total.item() != world_size:
        raise AssertionError(f"{world_size} ranks sum to {total.item()}")
    return total.item()


if __name__ == "__main__":
    first_all_reduce()
