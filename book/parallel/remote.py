"""L2: pipeline stages that live on other workers and are called over RPC; replicas of such pipelines train together.

Each rank is the worker `worker{rank}`. A driver holds references to its stages, sends micro-batches through them, and
lets torch's distributed autograd and `DistributedOptimizer` take the same path back. Workers that are not drivers serve
calls until all workers are done.

Stages compute on `message_device()`; messages are on the CPU. With a device map RPC can send tensors from one GPU to
another, but torch's documentation calls that beta, and rules out RRefs and distributed autograd with it.

Shapes: B sequences in the batch, T tokens, V vocabulary.
"""
from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

from book.device import message_device
from book.parallel.model import GPT, GPTConfig
from book.parallel.stage import GPTStage
from book.record import action_done, stage_action


@contextlib.contextmanager
def rpc_worker(num_threads: int = 16, timeout_s: float = 60) -> Iterator[int]:
    """Run the block as `worker{rank}`, then serve the other workers until all of them are done; yields the rank.

    `num_threads` threads serve calls. A pipeline needs more threads than micro-batches: each micro-batch may block one
    while it waits for its input, and replies need one too. A call that takes longer than `timeout_s` fails. Call
    `dist.init_process_group()` first.
    """
    if not dist.is_initialized():
        raise RuntimeError("a worker is named by its rank: call dist.init_process_group() before rpc_worker()")
    rank = dist.get_rank()
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=num_threads, rpc_timeout=timeout_s)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    yield rank
    # Not after an error: shutdown waits for calls, and one that never ends would hide it. The launcher ends the peers.
    rpc.shutdown()


class RemoteStage:
    """A stage of the small GPT on the worker that holds it; its methods are called remotely.

    Weights are drawn with `seed`, or from this worker's generator if there is none. With `peers`, the ranks that hold
    this stage in all replicas, the stage is a DDP module over them.
    """

    def __init__(self, config: GPTConfig, stage: int, num_stages: int, seed: int | None = None,
                 peers: Sequence[int] = ()) -> None:
        model = GPT(config) if seed is None else GPT.seeded(config, seed)
        self.device, self.stage = message_device(), stage
        self.part = GPTStage(model, stage, num_stages).to(self.device)
        self.module: nn.Module = self.part
        if peers:
            group = dist.new_group(list(peers), use_local_synchronization=True)
            self.module = DistributedDataParallel(self.part, process_group=group)
        self.lock = threading.Lock()
        self.part.model.blocks[self.part.first].register_forward_pre_hook(self._enter)

    def forward(self, x_rref: rpc.RRef, micro_batch: int) -> torch.Tensor:
        """Fetch a micro-batch from wherever it is and run it; threads serve calls, but only one computes at a time.

        Inputs and outputs are on the CPU.
        """
        x = x_rref.to_here().to(self.device)
        with self.lock, stage_action("F", self.stage, micro_batch):
            y = self.module(x)
            entry = self._entry
        if y.requires_grad:
            self._follow_backward(entry, y, micro_batch)
        return y.cpu()

    def wait_for_gradients(self, context_id: int, patience_s: float = 10) -> None:
        """Return once all parameters here have their gradient in a `dist_autograd.context`.

        A gradient appears there only once it includes all micro-batches. Raises RuntimeError after `patience_s`.
        """
        last_s, num_parameters = time.monotonic() + patience_s, len(list(self.part.parameters()))
        while (num_here := len(dist_autograd.get_gradients(context_id))) < num_parameters:
            if time.monotonic() > last_s:
                raise RuntimeError(f"stage {self.stage} has gradients of {num_here} of its {num_parameters} parameters "
                                   f"after {patience_s:g} s: does the loss use all of the pipeline's output?")
            time.sleep(0.001)

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """References to the parameters, which stay here, as `DistributedOptimizer` takes them."""
        return [rpc.RRef(parameter) for parameter in self.part.parameters()]

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters on the CPU, by their names in the whole GPT."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self.part.model.named_parameters()}

    def gradients(self, context_id: int) -> dict[str, torch.Tensor]:
        """The gradients in a `dist_autograd.context`, on the CPU, by parameter name; `.grad` stays None."""
        gradients = dist_autograd.get_gradients(context_id)
        return {name: gradients[parameter].cpu() for name, parameter in self.part.model.named_parameters()}

    def _enter(self, block: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        self._entry, = inputs

    def _follow_backward(self, entry: torch.Tensor, y: torch.Tensor, micro_batch: int) -> None:
        """Record the backward that autograd runs, from y's gradient arriving to that of the first block's input.

        Weight gradients may come later; on stage 0 the embedding's do.
        """
        started_s: list[float] = []
        y.register_hook(lambda gradient: started_s.append(time.monotonic()))
        entry.register_hook(lambda gradient: action_done("B", self.stage, micro_batch, started_s[0]))


class RemotePipeline:
    """A GPT whose stages live on `workers`, in that order; the rank that creates it drives it.

    `seed` is that of the whole model. `peers` has, for each stage, the ranks that hold it in all replicas: the drivers
    of all replicas create their pipelines at the same time, and DDP averages the gradients.
    """

    def __init__(self, workers: Sequence[str], config: GPTConfig, seed: int | None = None,
                 peers: Sequence[Sequence[int]] | None = None) -> None:
        num_stages = len(workers)
        self.stages = [rpc.remote(worker, RemoteStage, args=(config, stage, num_stages, seed,
                                                             peers[stage] if peers else ()))
                       for stage, worker in enumerate(workers)]

    def __call__(self, tokens_BT: torch.Tensor, num_micro_batches: int) -> torch.Tensor:
        """Token numbers (B, T) -> logits (B, T, V) on the CPU, in `num_micro_batches` that are in flight together.

        Only references pass through this process: a stage fetches its input from the previous stage. Micro-batches may
        overtake one another. Raises ValueError for more micro-batches than sequences.
        """
        if not 1 <= num_micro_batches <= len(tokens_BT):
            raise ValueError(f"{len(tokens_BT)} sequences can't make {num_micro_batches} micro-batches: each needs "
                             "at least one")
        logits = []
        for number, micro_batch in enumerate(tokens_BT.tensor_split(num_micro_batches)):
            x_rref = rpc.RRef(micro_batch.cpu())
            for stage in self.stages[:-1]:
                x_rref = stage.remote().forward(x_rref, number)
            logits.append(self.stages[-1].rpc_async().forward(x_rref, number))
        return torch.cat(torch.futures.wait_all(logits))

    def backward(self, context_id: int, loss: torch.Tensor) -> None:
        """Run `dist_autograd.backward`, then wait until every stage has all its gradients.

        In torch 2.13 that call may return before the first stage is done: if the gradients of two micro-batches reach a
        middle stage at the same time, that stage can forget that it passed one on (`clearOutstandingRpcs` in
        dist_engine.cpp). The optimizer would then step without it.
        """
        dist_autograd.backward(context_id, [loss])
        for waiting in [stage.rpc_async().wait_for_gradients(context_id) for stage in self.stages]:
            waiting.wait()

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """References to all stages' parameters."""
        return [parameter for stage in self.stages for parameter in stage.rpc_sync().parameter_rrefs()]

    def state(self) -> dict[str, torch.Tensor]:
        """The whole model's parameters, on the CPU, as `GPT.state_dict()` names them."""
        return {name: value for stage in self.stages for name, value in stage.rpc_sync().state().items()}

    def gradients(self, context_id: int) -> dict[str, torch.Tensor]:
        """The whole model's gradients in a `dist_autograd.context`, on the CPU, by the parameters' names."""
        return {name: gradient for stage in self.stages
                for name, gradient in stage.rpc_sync().gradients(context_id).items()}
