"""Train the model of train_ddp.py with FSDP2: every rank holds a part of each parameter, and saves that part.

    torchrun --nproc-per-node 2 examples/train_fsdp.py
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_fsdp.py --epochs 3 --checkpoint run

It takes the same arguments, and resumes in the same way; the checkpoint is a folder. Read train_ddp.py first: what
follows is what differs.
"""
import argparse
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from train_ddp import Model, arguments, make_loader, random_state, set_random_state, set_up

State = dict[str, object]


def build(asked: argparse.Namespace, vocabulary: int, device: torch.device) -> Model:
    """The model, cut over all ranks: each layer is gathered before it computes, and dropped after."""
    torch.manual_seed(0)  # alike on all ranks: each keeps its part of what it has drawn
    model = Model(vocabulary, asked.context)
    model = model.to(device, torch.float64 if asked.precision == "float64" else torch.float32)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if asked.precision == "bf16" else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    if asked.precision == "bf16":  # or the loss is computed in bf16, which has 3 digits
        policy = replace(policy, output_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)  # what no layer holds: embedding, positions, head
    torch.manual_seed(1 + dist.get_rank())  # from here on each rank has dropout of its own
    return model


def state_of(model: Model, optimizer: torch.optim.Optimizer, place: list[int], device: torch.device) -> State:
    """What a checkpoint holds. Tensors cut by FSDP are saved in parts; of any other, one rank saves the whole."""
    parameters, moments = get_state_dict(model, optimizer)
    own = {f"random.{dist.get_rank()}.{number}": state for number, state in enumerate(random_state(device))}
    return {"model": parameters, "optimizer": moments, "place": torch.tensor(place)} | own


def save(folder: Path, model: Model, optimizer: torch.optim.Optimizer, place: list[int], device: torch.device) -> None:
    """Write a checkpoint into a folder of its own, then remove the former one."""
    former = finished(folder)
    dcp.save(state_of(model, optimizer, place, device), checkpoint_id=folder / "{:04}-{:06}".format(*place))
    if dist.get_rank() == 0 and former:
        shutil.rmtree(former)


def load(folder: Path, model: Model, optimizer: torch.optim.Optimizer, device: torch.device) -> list[int]:
    """Read the last checkpoint that is complete, and return its epoch and step; the beginning if there is none."""
    last = finished(folder)
    if last is None:
        return [0, 0]
    saved = {name.split(".")[1] for name in dcp.FileSystemReader(last).read_metadata().state_dict_metadata
             if name.startswith("random.")}
    if len(saved) != dist.get_world_size():  # each has its own random state
        raise SystemExit(f"{last} is of {len(saved)} ranks: start as many, or name another --checkpoint")
    state = state_of(model, optimizer, [0, 0], device)
    dcp.load(state, checkpoint_id=last)  # into these tensors: every rank reads its own part
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    set_random_state([value for name, value in state.items() if name.startswith("random")], device)
    return state["place"].tolist()


def finished(folder: Path) -> Path | None:
    """The newest checkpoint that was not interrupted: the file .metadata is written when all ranks are done."""
    return max((found.parent for found in folder.glob("*/.metadata")), default=None)


def train_step(model: Model, optimizer: torch.optim.Optimizer, micro_batches: list, device: torch.device) -> float:
    """Train on one step's micro-batches, and return their loss: the mean over all ranks."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        model.set_requires_gradient_sync(number == len(micro_batches))  # in the place of no_sync()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        (loss / len(micro_batches)).backward()
        total += loss.detach() / len(micro_batches)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm of the whole model: gradients are DTensors
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    asked = arguments()
    device = set_up()
    loader = make_loader(asked, device)
    model = build(asked, len(loader.dataset.vocabulary), device)
    optimizer = torch.optim.AdamW(model.parameters(), asked.lr)
    start, first = load(asked.checkpoint, model, optimizer, device)
    num_steps = len(loader) // asked.accumulate
    for epoch in range(start, asked.epochs):
        loader.sampler.set_epoch(epoch)
        loader.sampler.start = first * asked.accumulate * asked.batch
        loader.generator.manual_seed(epoch)
        batches = iter(loader)
        for step in tqdm(range(first, num_steps), f"epoch {epoch}", disable=dist.get_rank() > 0):
            loss = train_step(model, optimizer, list(islice(batches, asked.accumulate)), device)
            if asked.losses and dist.get_rank() == 0:
                with open(asked.losses, "a") as file:
                    print(epoch, step, loss, file=file)
            if step + 1 == num_steps:
                save(asked.checkpoint, model, optimizer, [epoch + 1, 0], device)
            elif (step + 1) % asked.save_every == 0:
                save(asked.checkpoint, model, optimizer, [epoch, step + 1], device)
        first = 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
