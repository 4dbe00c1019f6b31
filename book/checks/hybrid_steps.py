"""L3, lab 7: training on a mesh: what it was built from, its losses and updates, what it sent; torch's own parts."""
from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import _bootstrap
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from book.checks.formula import Formula
from book.launch import LaunchError
from book.checks.verdict import (
    ROUNDED, SIX_DIGITS, CheckFailed, Gradients, StateDict, agree, flat, identical, likeliest, refuse,
    require, reworded, same_loss, short, with_hint,
)
from book.mesh import Mesh
from book.trace import parting

_IMPORTS: CodeType = vars(_bootstrap)["_find_and_load"].__code__  # runs as long as a module is imported
TORCH_HINTS = {  # what an error of torch's own parts says, and what to look at
    "Cannot distribute a DTensor": "you cut something that is already sharded over dp: cut over tp first, then shard "
                                   "over dp",
    "value was None when it should not be": 'did you give fully_shard its mesh, mesh=mesh["dp"]?',
    "KeyError: 'betas'": "the optimizer's settings are in a list without names, so stages overwrite one another's: "
                         "flatten_optimizer_state_dict=True stores them by parameter name",
    "Missing key": "the checkpoint does not have this name: was it saved, and under a name that means the same in all "
                   "shapes? A second dcp.save into a folder overwrites the first, so save everything in one call. "
                   "With full_state_dict=True, what ranks other than 0 hold may be missing",
    "KeyError: 'param_groups'": "what get_state_dict gives is stored by parameter name: hand it back with "
                                "set_state_dict, not with the optimizer's own load_state_dict",
    "gather_object(dst=0)": "dcp.save and dcp.load are collectives: every rank calls them, for what it holds itself, "
                            "and no rank overwrites another's files. Do all of your ranks call them?",
    "overlapping meshes": 'something is sharded over one axis twice: shard each block first, the whole part last, and '
                          'all over mesh["dp"]',
    "must match the size of tensor": "q, k and v have different numbers of heads: cut all three by columns "
                                     "(ColwiseParallel), and out by rows (RowwiseParallel)",
    "Sharding propagation failed": "a layer's output is not cut as the next layer expects: cut q, k, v and up by "
                                   "columns (ColwiseParallel), out and down by rows (RowwiseParallel)"}


# By hand

@contextmanager
def calls_into(places: Sequence[str]) -> Iterator[set[str]]:
    """Note in which of these places, parts of file names, functions are called in this block, by this thread.

    Only calls count, not what a module does when it is imported: whether it still has to be depends on what the ranks
    were forked from. If the block raises an error after such a call, the call is reported instead: code
    that is not built by hand may fail before the check.
    """
    found: set[str] = set()
    files: set[str] = set()  # that have been looked at: Python calls `note` for each call and return, of C too
    before, imports = sys.getprofile(), 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal imports
        if event == "call":
            code = frame.f_code
            if code is _IMPORTS:
                imports += 1
            elif not imports and code.co_filename not in files:
                files.add(code.co_filename)
                name = code.co_filename.replace(os.sep, "/")
                found.update(place for place in places if place in name)
        elif event == "return" and imports and frame.f_code is _IMPORTS:
            imports -= 1

    sys.setprofile(note)
    try:
        yield found
    except Exception:
        _refuse("your code", found)
        raise
    finally:
        sys.setprofile(before)


def by_hand(called: Sequence[set[str]]) -> None:
    """`called`, what `calls_into` found on each rank, must be empty."""
    for rank, own in enumerate(called):
        _refuse(f"rank {rank}", own)


def one_run_a_step(num_runs: Sequence[int]) -> None:
    """Each pipeline must run once in a step, with all micro-batches; `num_runs` has by rank how often it ran."""
    for rank, runs in enumerate(num_runs):
        require(runs <= 1, f"rank {rank} runs its pipeline {runs} times in a step. With one micro-batch in each run, "
                "no two stages compute at the same time: give run all micro-batches at once")


def _refuse(who: str, called: set[str]) -> None:
    for place in sorted(called):
        raise CheckFailed(f"{who} calls functions of {place.replace('/', '.')}, but in this exercise you put the three "
                          "kinds of parallelism together by hand")


# Losses and updates

def first_losses(losses: Sequence[Any], sequences: Sequence[float], mesh: Mesh, num_micro_batches: int) -> None:
    """`losses` has by rank what the first step returned: the mean of its share on the last stage, None elsewhere.

    `sequences` are the losses of the batch's sequences one by one; shares may be any that do not overlap.
    """
    last, dp = mesh.size("pp") - 1, mesh.size("dp")
    for rank, loss in enumerate(losses):
        stage = mesh.coordinates(rank)["pp"]
        refuse(stage < last and loss is not None,
               f"rank {rank}, of stage {stage}, returns {loss!r}, but only the last stage knows the loss")
        refuse(stage == last and loss is None,
               f"rank {rank}, of the last stage, returns no loss: step must return what the pipeline returns")
    for rank, loss in ((rank, float(loss)) for rank, loss in enumerate(losses) if loss is not None):
        first = mesh.group_of(rank, "tp")[0]
        require(np.isclose(loss, float(losses[first]), rtol=1e-9), f"ranks {first} and {rank} of one tp group have "
                f"different losses, {short(float(losses[first]))} and {short(loss)}: they must work on the same share, "
                "with the same weights where nothing is cut")
    replicas = [float(loss) for loss in _by_replica(losses, mesh)]
    mean, got = float(np.mean(sequences)), float(np.mean(replicas))
    formula = Formula(mean, [
        (mean * num_micro_batches, "it is the sum over the micro-batches: weight each by 1 / (number of "
         "micro-batches)"),
        (mean / num_micro_batches, "it is divided by the number of micro-batches twice"),
        *((float(np.mean(share)), f"it is the loss of share {place} alone: each replica must take its own share")
          for place, share in enumerate(np.array_split(sequences, dp)) if dp > 1),
        (mean / dp, "it is divided by the number of replicas: return the mean over the share")])
    formula.require_right("the mean of the replicas' losses in step 0", got)
    refuse(dp > 1 and np.ptp(sequences) > 0 and np.allclose(replicas, mean, rtol=1e-9, atol=0), "every replica returns "
           f"the loss {short(mean)} in step 0, the mean over the replicas, but each must return the mean over its own "
           "share")


def moved(before: Sequence[StateDict], after: Sequence[StateDict], gradients: Sequence[Gradients],
          learning_rate: float) -> None:
    """The first step of SGD must have moved every weight along its gradient."""
    for rank, (start, end) in enumerate(zip(before, after)):
        require(any(not identical(start[name], end[name]) for name in start), "the gradients are right, but rank "
                f"{rank}'s weights have not changed: which parameters did you give the optimizer? Cutting makes new "
                "ones")
        for name, value in start.items():
            want = flat(value) - learning_rate * flat(gradients[rank][name])
            what = "has not moved" if identical(value, end[name]) else "has not moved by lr times its gradient"
            require(agree(end[name], want, want), f"rank {rank}'s {name} {what} in the first step: is the optimizer "
                    "made once, after the cuts, from all parameters of the part?")


def mesh_losses(losses: Sequence[Sequence[Any]], expected: Sequence[float], mesh: Mesh) -> float:
    """The mean of the replicas' losses must be `expected`, one process's, in each step. Returns the last."""
    got = _mean_losses(losses, mesh)
    step = parting(got, expected, same_loss)
    if step is not None:
        why = likeliest(
            (np.isclose(got[step], expected[step], rtol=SIX_DIGITS, atol=0), ROUNDED),
            (step, "the first step was right, so what carries over from step to step? Are gradients cleared, and does "
             "every rank step?"),
            (True, "which weights does each rank start from, and which part of the batch does it take?"))
        raise CheckFailed(f"the loss of step {step} is {short(got[step])}, but one process has "
                          f"{short(expected[step])}: {why}")
    return float(got[-1])


def traffic_by_axis(answer: Any, want: Mapping[str, float], rank: int, slips: Mapping[str, Sequence[tuple[float, str]]]
                    ) -> None:
    """`answer` must be what a rank sends along each axis in a step, as its recording has it."""
    require(isinstance(answer, Mapping) and set(answer) == set(want),
            f"predicted_bytes must return a dict with the bytes of {', '.join(want)}")
    for axis, value in want.items():
        none = (f"rank {rank} sends nothing along {axis}, but you predict {answer[axis]!r}: a group of one rank has "
                "nobody to send to")
        with reworded(after=f" (recorded: {short(value)})", instead="" if value else none):
            Formula(value, slips.get(axis, ())).require_right(f"rank {rank}, {axis}: the number of bytes", answer[axis])


def _by_replica(losses: Sequence[Any], mesh: Mesh) -> list[Any]:
    """What the last stage of every replica returned, on its first rank of tp."""
    last = mesh.size("pp") - 1
    return [losses[mesh.rank_at(pp=last, dp=replica, tp=0)] for replica in range(mesh.size("dp"))]


def _mean_losses(losses: Sequence[Sequence[Any]], mesh: Mesh) -> np.ndarray:
    """The mean of the replicas' losses in each step."""
    return np.mean([[float(loss) for loss in own] for own in _by_replica(losses, mesh)], axis=0)


# Torch's own parts

def torch_failure(error: LaunchError) -> str:
    """An error of a rank that combines torch's own parts, with a hint if torch gives none."""
    return with_hint(error, TORCH_HINTS)


def placements(placed: Sequence[Mapping[str, tuple[Any, ...]]], layout: Mapping[str, int | None]) -> None:
    """`placed` has by rank, for each parameter, the placements of its DTensor, none for an ordinary tensor.

    `layout` says along which dim it is to be cut over tp; what fully_shard does comes before that in the placements.
    """
    for rank, name, where in ((rank, name, where) for rank, own in enumerate(placed) for name, where in own.items()):
        dim = layout[name]
        require(where, f"rank {rank}'s {name} is an ordinary tensor: call fully_shard on the part too, after its "
                "blocks, so that the rest of it is sharded over dp")
        refuse(dim is not None and len(where) < 2, f"rank {rank}'s {name} has only one placement, {where[0]}: "
               "parallelize_module must cut it over tp (does the plan name its layer?), and then fully_shard over dp")
        refuse(dim is not None and not (where[-1].is_shard() and where[-1].dim == dim), f"rank {rank}'s {name} is "
               f"placed as {where[-1]} over tp, but should be cut along dim {dim}: q, k, v and up by columns, out and "
               "down by rows")


def units_of_blocks(units: Sequence[Sequence[bool]]) -> None:
    """Each block must be a unit of fully_shard; `units` says by rank, for each block of its stage, whether it is."""
    for rank, own in enumerate(units):
        refuse(own.count(False), f"{own.count(False)} of the {len(own)} blocks on rank {rank} are not sharded on their "
               'own, so a step gathers them all at once: call fully_shard(block, mesh=mesh["dp"]) for each block, then '
               "for the part")


def saved(folder: str) -> None:
    """There must be a checkpoint in the folder."""
    if not (Path(folder) / ".metadata").exists():
        refuse(any(Path(folder).rglob(".metadata")), "save has written into folders in the folder, which makes several "
               "checkpoints: all ranks write one together, each its own files, with the same checkpoint_id=folder")
        raise CheckFailed("save has written no checkpoint into the folder: call dcp.save(state, checkpoint_id=folder) "
                          "on every rank")


def resumed(losses: Sequence[Sequence[Any]], expected: Sequence[float], num_saved: int, mesh: Mesh) -> float:
    """The losses after `num_saved` steps must go on as in a run that was not interrupted. Returns the last."""
    got, want = _mean_losses(losses, mesh), expected[num_saved:]
    step = parting(got, want, same_loss)
    if step is None:
        return float(got[-1])
    head = f"resumed at {mesh.shape}, step {num_saved + step} has the loss {short(got[step])}, not {short(want[step])}"
    require(step, f"{head}: the weights are not those that were saved. dcp.load fills the dict that you give it: did "
            "you hand the model's state back to the part?")
    raise CheckFailed(f"{head}. The first step was right, so the weights came back, but the optimizer's state did not: "
                      "its moments, step count and settings must go into the checkpoint and back into the optimizer. "
                      "Only set_state_dict hands back settings such as the learning rate: call it after dcp.load")
