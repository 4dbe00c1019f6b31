"""L2: an error of torch's in plain words, with what the rank knows: names, lines, numbers of the world.

An explanation is a function `look(error, frames)` that returns a sentence, or None for an error that it does not know.
It reads the types and variables of the frames that raised. Torch's text is read only where torch gives no other fact:
the indices of parameters, limits of time, and which error of the system a RuntimeError stands for.
"""
from __future__ import annotations

import errno
import os
import re
import resource
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from book import tap
from book.launch import children, files, starts, where
from book.waiting.doing import Doing, Kind
from book.words import joined, listed, plural

MOST_NAMES = 6
DEVICE = ('this run has no GPU: use torch.device("cpu"), or what rank_device() of book.device returns, a GPU if '
          "there is one")
_INDICES = re.compile(r"did not receive grad .*?: ([\d ]+)")
_LIMIT = re.compile(r"(?:Timed out waiting|wait timeout after|in|after) (\d+) ?ms")
_TIMED_OUT = re.compile(r"timed out|wait timeout after|failed to pass monitoredBarrier", re.IGNORECASE)
_IN_USE = re.compile(r"port: (\d+).*EADDRINUSE", re.DOTALL)
_NO_GPU = re.compile(r"not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|accelerator device when none|"
                     r"_cuda_setDevice|NCCL built in|no GPUs found|not linked with support for cuda")
NO_FILES = "Too many open files"
_PREFIXES = {"module.": "as those of a model in DDP do", "_orig_mod.": "as those of a compiled model do"}

Look = Callable[[BaseException, Sequence[FrameType]], str | None]


class Waited(NamedTuple):
    """A wait that took longer than its limit: in what, and the limit if torch has said it."""
    doing: Doing
    limit_s: float | None


def explained(error: BaseException) -> str | None:
    """What is to be said in place of an error's own words; None for an error that says enough itself."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for look in EXPLANATIONS:
        try:
            if sentence := look(error, frames):
                return sentence
        except Exception:
            continue  # what its frames hold is not as expected
    return None


def waited(error: BaseException, text: str) -> Waited | None:
    """What a rank waited in when its time was up; None if this error, with this text, is another."""
    if not isinstance(error, RuntimeError) or not _TIMED_OUT.search(text):
        return None
    limit = _LIMIT.search(text)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return Waited(where.operation(frames) or _of_request(frames), int(limit[1]) / 1000 if limit else None)


def _of_request(frames: Sequence[FrameType]) -> Doing:
    """What a wait() or a backward waited in: no function of torch.distributed was running."""
    if _calls(frames, "backward"):
        return Doing(Kind.CALL, "backward")
    op = next((op for op in reversed(tap.ops()) if op.function and not op.waited and not op.withdrawn), None)
    if op is None:
        return Doing(Kind.REQUEST)
    return Doing(Kind.REQUEST, op.function or "", op.peer, {"recv": "src", "send": "dst"}.get(op.kind, ""))


def _calls(frames: Sequence[FrameType], name: str) -> bool:
    return any(name in where.line_of(frame).calls() for frame in frames)


def _frame(frames: Sequence[FrameType], name: str, file: str) -> dict[str, Any] | None:
    """The variables of a function of torch's that was running."""
    return next((frame.f_locals for frame in reversed(frames)
                 if frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file)), None)


# Processes of a DataLoader

def lost_worker(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """A worker of a DataLoader that has died."""
    return children.lost() if isinstance(error, (RuntimeError, ConnectionError, EOFError)) else None


def failed_worker(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """A worker of a DataLoader that has raised."""
    return children.raised(error)


# DDP

def unused_parameters(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """Parameters without a gradient, which DDP knows by number."""
    indices = _INDICES.search(str(error)) if isinstance(error, RuntimeError) else None
    models = [frame.f_locals["self"] for frame in frames if "self" in frame.f_locals
              and hasattr(frame.f_locals["self"], "_module_parameters")]
    if indices is None or not models:
        return None
    known = {id(parameter): name for name, parameter in models[0].module.named_parameters()}
    parameters = models[0]._module_parameters
    names = [known[id(parameters[index])] for index in map(int, indices[1].split())]
    told = [*names[:MOST_NAMES], *["..."] * (len(names) > MOST_NAMES)]
    return (f"the backward before this forward gave {listed(told)} no gradient: this loss does not use "
            f"{'it' if len(names) == 1 else 'them'}. Use {'it' if len(names) == 1 else 'them'} in the loss on every "
            "rank, freeze with requires_grad_(False) before DDP, or pass find_unused_parameters=True to DDP")


def devices_of_ddp(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """GPU numbers for a model that is on the CPU."""
    values = _frame(frames, "__init__", "/nn/parallel/distributed.py")
    if not isinstance(error, ValueError) or not values or values.get("device_ids") is None:
        return None
    if any(parameter.device.type != "cpu" for parameter in values["module"].parameters()):
        return None
    return f"the model is on the CPU, and device_ids={values['device_ids']} names a GPU: leave device_ids out"


# What a rank of the world is called in a group

def rank_of_group(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """A rank that is not in the group: perhaps its number in the group was meant."""
    values = _frame(frames, "get_group_rank", "/distributed_c10d.py")
    if not isinstance(error, ValueError) or values is None:
        return None
    import torch.distributed as dist
    rank, ranks = values["global_rank"], dist.get_process_group_ranks(values["group"])
    if rank in ranks:
        return None
    side = next((side for frame in frames for side in ("src", "dst") if frame.f_locals.get(side) == rank), "src")
    has = f"this group has {plural('rank', len(ranks))} {joined(ranks)}, not {rank}: {side}= is a rank of the world"
    meant = f" For the group's own number {rank}, pass {side}={ranks[rank]} or group_{side}={rank}" if (
        0 <= rank < len(ranks)) else ""
    return f"{has}.{meant}"


def barrier_without_gloo(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """monitored_barrier asks for the backend's name, and a group without one has gloo unseen."""
    if not isinstance(error, ValueError) or _frame(frames, "monitored_barrier", "/distributed_c10d.py") is None:
        return None
    return 'monitored_barrier needs a group whose backend is named: dist.init_process_group("gloo")'


# Keys of a checkpoint

def keys_of_checkpoint(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """A checkpoint whose keys differ from the model's by what they begin with."""
    values = _frame(frames, "load_state_dict", "/nn/modules/module.py")
    if not isinstance(error, RuntimeError) or values is None:
        return None
    own, found = set(values["self"].state_dict()), set(values["state_dict"])
    if begin := _prefix(found, own):
        how = _PREFIXES.get(begin)
        advice = "save model.module.state_dict()" if begin == "module." else "save that of the model itself"
        return (f"the checkpoint's keys begin with {begin!r}{', ' + how if how else ''}, and this model's do not: "
                f"{advice}, or load {{key.removeprefix({begin!r}): value for key, value in checkpoint.items()}}")
    if begin := _prefix(own, found):
        how = _PREFIXES.get(begin)
        inner = "model.module" if begin == "module." else f"the model's {begin.rstrip('.')}"
        return (f"this model's keys begin with {begin!r}{', ' + how if how else ''}, and the checkpoint's do not: call "
                f"load_state_dict of {inner}")
    return None


def no_checkpoint(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """A distributed checkpoint that is not there, or not complete."""
    values = _frame(frames, "load", "/checkpoint/state_dict_loader.py")
    last = files.last_file(values.get("checkpoint_id")) if values else None
    if last is None or os.path.exists(last):
        return None
    return (f"{os.path.dirname(last)} holds no complete checkpoint: dcp.save writes its file .metadata last, and it is "
            "not there")


def _prefix(longer: set[str], shorter: set[str]) -> str | None:
    """What each of these keys begins with, if the others are the same without it."""
    sample = min(longer, default="")
    begin = next((sample.removesuffix(key) for key in shorter if sample.endswith("." + key)), None)
    return begin if begin and {key.removeprefix(begin) for key in longer} == shorter else None


# What this machine does not have

def no_gpu(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """A GPU is asked for where there is none."""
    import torch
    return DEVICE if not torch.cuda.device_count() and _NO_GPU.search(str(error)) else None


def port_in_use(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """A port at which another process listens."""
    port = _IN_USE.search(str(error))
    if port is None:
        return None
    line = starts.line_that_set("MASTER_PORT")
    written = f", and {line} asks for it" if line else ""
    return (f"port {port[1]} is in use by another process of this machine, an earlier run perhaps{written}: leave the "
            "port to launch, as to torchrun")


def no_files_left(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """Too many open files."""
    if getattr(error, "errno", None) != errno.EMFILE and NO_FILES not in str(error):
        return None
    return too_many_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def too_many_files(limit: int | None) -> str:
    """What to say of a rank that can open no more files."""
    most = f"a rank may have {limit} open files" if limit else "a rank may have only so many open files"
    return (f"{most}, and has them all: each process group needs a connection to each of its ranks. Make groups "
            "once, before the loop, and raise the limit with ulimit -n")


EXPLANATIONS: Sequence[Look] = (
    failed_worker, lost_worker, unused_parameters, devices_of_ddp, rank_of_group, barrier_without_gloo,
    keys_of_checkpoint, no_checkpoint, no_gpu, port_in_use, no_files_left,
)
