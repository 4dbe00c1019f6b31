"""L2: gradients of which only the largest numbers are sent, as chapter 15 trains with them: a hook for DDP.

What is not sent is not lost: it is added to the next step's gradient (error feedback, seide2014; for the largest
numbers, stich2018). Torch's own hooks, for 16 bits and for low rank, are in
`torch.distributed.algorithms.ddp_comm_hooks`.
"""
# No `from __future__ import annotations`: DDP compares a hook's annotations with classes, and refuses their names.
import torch
import torch.distributed as dist
from torch import nn

from book.parallel.checked import checked_by


def _check(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, not {share!r}")


class TopK:
    """Each rank sends the largest `share` of the numbers in each bucket of its gradients, with their places.

    `parallel.register_comm_hook(None, TopK(0.01).reduce)`. With `keep` the rest is added to the next gradient. All
    ranks of `group` get the mean of what was sent. Raises ValueError for a share outside (0, 1].
    """

    @checked_by(_check)
    def __init__(self, share: float, keep: bool = True, group: dist.ProcessGroup | None = None) -> None:
        self.share, self.keep, self.group = share, keep, group
        self.left: dict[nn.Parameter, torch.Tensor] = {}  # by parameter: DDP may put them into other buckets

    def reduce(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A future of the bucket's mean gradient, for DDP."""
        flat, parameters, num_ranks = bucket.buffer(), bucket.parameters(), dist.get_world_size(self.group)
        for gradient, parameter in zip(bucket.gradients(), parameters):
            if parameter in self.left:
                gradient += self.left[parameter]
        num = max(1, int(self.share * flat.numel()))
        places = flat.abs().topk(num).indices.int()
        all_places, all_numbers = places.new_empty(num_ranks * num), flat.new_empty(num_ranks * num)
        dist.all_gather_into_tensor(all_places, places, group=self.group)
        dist.all_gather_into_tensor(all_numbers, flat[places], group=self.group)
        flat[places] = 0
        if self.keep:
            self.left = self.left | {parameter: gradient.clone() for gradient, parameter in
                                     zip(bucket.gradients(), parameters)}
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(flat.zero_().index_add_(0, all_places, all_numbers / num_ranks))
        return done
