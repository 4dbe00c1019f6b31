"""L1: the GPUs and links of a cluster, and the overheads of software on them."""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Overheads:
    """Time and memory beyond FLOPs and bytes. All are zero by default, which leaves the plain formulas.

    A product of depth k takes as long as one of k + `product_depth`; in fp8 k is over `linear_speedup` in layers, not
    in attention and the head. Attention that keeps no scores reaches `attention_share` of the peak (0: the efficiency
    of products). A layer's forward takes `launch_s` at least, its backward twice that; with experts `expert_launch_s`
    more, for the host can't launch their products before it knows how many tokens each got. Of the bandwidth inside a
    node `inside_share` is reached,
    of that between nodes `across_share`. Between nodes an all-reduce of tp
    waits `hop_s` for each doubling of its group, twice; a message to the next stage waits `send_node_s` for each
    further node of the cluster; data parallelism's ring waits `ring_hop_s` in each layer for each of its members. Of
    tp's messages `tensor_hidden_share` hides behind products, of those between interleaved stages `stage_hidden_share`.
    Data parallelism's overlap with `hidden_share` of the last micro-batch's backward, those of ZeRO-2 and 3 do
    not; parameters are gathered in `gather_bytes` each. `head_share` of the logits'
    time makes other stages wait; the rest is spread. `slowdown` multiplies the whole step.

    Activations are `kept_factor` times as many bytes, for unfused operations keep more; a logit takes `logit_bytes`.
    `fixed_bytes` are used by every layout: workspaces, buffers, fragmentation.

    Raises ValueError for a negative number, and for a share above 1.
    """

    product_depth: float = 0.0
    attention_share: float = 0.0
    linear_speedup: float = 1.0
    launch_s: float = 0.0
    expert_launch_s: float = 0.0
    inside_share: float = 1.0
    across_share: float = 1.0
    hop_s: float = 0.0
    send_node_s: float = 0.0
    ring_hop_s: float = 0.0
    tensor_hidden_share: float = 0.0
    stage_hidden_share: float = 0.0
    hidden_share: float = 0.0
    head_share: float = 0.0
    gather_bytes: float = 2.0
    slowdown: float = 1.0
    kept_factor: float = 1.0
    logit_bytes: float = 4.0
    fixed_bytes: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or (field.name.endswith("_share") and value > 1):
                raise ValueError(f"{field.name} can't be {value}: it is at least 0, and a share at most 1")
        if not min(self.across_share, self.inside_share, self.linear_speedup, self.slowdown, self.kept_factor) > 0:
            raise ValueError("shares of bandwidths, linear_speedup, slowdown and kept_factor are above 0")


@dataclass(frozen=True)
class Cluster:
    """GPUs and links. Bandwidths are one direction's, `across_bytes_per_s` what each GPU has to other nodes.

    Two constants are fitted to measured steps: `efficiency`, the share of the peak that matrix products reach, and
    `num_passes`, how often the activations of a layer pass through memory for everything but products (norms, dropout,
    softmax); `overheads` holds the others. `usable_share` of the memory is for training; the rest belongs to the
    allocator and the libraries. Raises ValueError for no GPU, a rate of 0, or a share outside 0 to 1.
    """

    num_gpus: int
    memory_bytes: float
    flops_per_s: float
    memory_bytes_per_s: float
    inside_bytes_per_s: float
    across_bytes_per_s: float
    efficiency: float
    num_passes: float
    gpus_per_node: int = 8
    usable_share: float = 0.9
    overheads: Overheads = Overheads()

    def __post_init__(self) -> None:
        if min(self.num_gpus, self.gpus_per_node) < 1:
            raise ValueError(f"a cluster has at least one GPU, and a node too: {self}")
        for name in ("memory_bytes", "flops_per_s", "memory_bytes_per_s", "inside_bytes_per_s", "across_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("efficiency", "usable_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share, above 0 and at most 1, not {getattr(self, name)}")
        if not self.num_passes >= 0:
            raise ValueError(f"num_passes is at least 0, not {self.num_passes}")

    @property
    def usable_bytes(self) -> Any:
        """Bytes of a GPU's memory that a layout may need."""
        return self.usable_share * self.memory_bytes
