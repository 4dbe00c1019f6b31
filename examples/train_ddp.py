"""Train a small language model with DistributedDataParallel, and go on after a crash as if there had been none.

    torchrun --nproc-per-node 2 examples/train_ddp.py
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_ddp.py --epochs 3 --checkpoint run.pt

It runs on GPUs with NCCL where every rank has one, else on the CPU with gloo. Killed and started again, by you or by
torchrun, it resumes from its checkpoint; in float64 on as many ranks as before, every loss is the same to the last
bit. (Without that variable, torch 2.13's torchrun gives restarted ranks the store in which the addresses of the ranks
before them still stand, and often gloo connects to nobody.)
"""
import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to train on (default: this program)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--context", type=int, default=32, help="characters of a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=2, help="processes of a rank that load data")
    parser.add_argument("--precision", choices=["bf16", "float32", "float64"], default="bf16")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--losses", type=Path, help="a file that gets a line with epoch, step and loss for each step")
    return parser.parse_args()


class Characters(Dataset):
    """Sequences of characters, each with the sequence that comes one character later."""

    def __init__(self, text: str, context: int) -> None:
        self.vocabulary = sorted(set(text))
        place = {character: number for number, character in enumerate(self.vocabulary)}
        self.tokens, self.context = torch.tensor([place[character] for character in text]), context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.tokens[number * self.context:(number + 1) * self.context + 1]
        return piece[:-1], piece[1:]


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that leaves out the first `start` samples of the epoch: those a checkpoint has seen."""

    start = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.start, None)

class Model(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, vocabulary: int, context: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(context, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device, self.place.dtype)
        x = self.embed(tokens) + self.place
        for layer in self.layers:
            x = layer(x, src_mask=later, is_causal=True)
        return self.head(self.norm(x))


def set_up(**how: object) -> torch.device:
    """Join the other ranks, and return this rank's device. `how` they meet torchrun has said, unless it is given."""
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= local_world_size
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo",
                            device_id=device if on_gpu else None, **how)
    # Each rank has dropout of its own; DDP copies rank 0's parameters.
    torch.manual_seed(dist.get_rank())
    return device


def make_loader(asked: argparse.Namespace, device: torch.device) -> DataLoader:
    data = Characters(asked.text.read_text("utf-8"), asked.context)
    return DataLoader(data, asked.batch, sampler=ResumableSampler(data, drop_last=True), num_workers=asked.workers,
                      pin_memory=device.type == "cuda", persistent_workers=asked.workers > 0, drop_last=True,
                      generator=torch.Generator())  # of its own: an iterator draws from it, and dropout must not notice


def random_state(device: torch.device) -> list[torch.Tensor]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_random_state(state: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1].cpu(), device)


def save(path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, place: dict[str, int]) -> None:
    """Write a checkpoint from rank 0: what all ranks share once, and the random state of each."""
    device = next(model.parameters()).device
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, random_state(device))
    if dist.get_rank() == 0:
        part = path.with_suffix(".part")
        torch.save({"model": model.module.state_dict(), "random": states,
                    "optimizer": optimizer.state_dict()} | place, part)
        os.replace(part, path)  # a rank killed before this leaves the old file whole


def load(path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Read the checkpoint on every rank, and return where to go on; the beginning if there is none."""
    if not path.exists():
        return {"epoch": 0, "step": 0}
    device = next(model.parameters()).device
    kept = torch.load(path, map_location=device, weights_only=True)
    if len(kept["random"]) != dist.get_world_size():
        raise SystemExit(f"{path} is of {len(kept['random'])} ranks: start as many, or name another --checkpoint")
    model.module.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    set_random_state(kept["random"][dist.get_rank()], device)
    return {"epoch": kept["epoch"], "step": kept["step"]}


def train_step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, micro_batches: list,
               mixed: torch.autocast) -> float:
    """Train on one step's micro-batches, and return their loss: the mean over all ranks."""
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        last = number == len(micro_batches)
        # Only the last backward averages gradients over the ranks.
        with nullcontext() if last else model.no_sync():
            with mixed:
                logits = model(inputs).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, targets.flatten())
            (loss / len(micro_batches)).backward()
        total += loss.detach() / len(micro_batches)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()  # waits for the GPU: in a long run, look at the loss every so often


def main(**how: object) -> None:
    asked = arguments()
    device = set_up(**how)
    loader = make_loader(asked, device)
    dtype = torch.float64 if asked.precision == "float64" else torch.float32
    model = Model(len(loader.dataset.vocabulary), asked.context).to(device, dtype)
    model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), asked.lr)
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=asked.precision == "bf16")
    place = load(asked.checkpoint, model, optimizer)
    num_steps = len(loader) // asked.accumulate
    if num_steps == 0:
        raise SystemExit(f"{asked.text} is too short for one step: take a longer --text or a smaller --batch")
    for epoch in range(place["epoch"], asked.epochs):
        first, place["step"] = place["step"], 0
        loader.sampler.set_epoch(epoch)  # without it every epoch has the same order
        loader.sampler.start = first * asked.accumulate * asked.batch
        loader.generator.manual_seed(epoch)
        batches = iter(loader)
        for step in tqdm(range(first, num_steps), f"epoch {epoch}", disable=dist.get_rank() > 0):
            loss = train_step(model, optimizer, list(islice(batches, asked.accumulate)), mixed)
            if asked.losses and dist.get_rank() == 0:
                with open(asked.losses, "a") as file:
                    print(epoch, step, loss, file=file)
            if step + 1 == num_steps:
                save(asked.checkpoint, model, optimizer, {"epoch": epoch + 1, "step": 0})
            elif (step + 1) % asked.save_every == 0:
                save(asked.checkpoint, model, optimizer, {"epoch": epoch, "step": step + 1})
    del model  # freed after its group, DDP frees the group too, and in torch 2.13 the rank can wait for itself
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
