"""L3: lab 12: the guilty rank of a hang, what a checkpoint holds and when it is whole, a run that goes on."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

from book.checks.formula import Formula
from book.launch import LaunchError, RankError
from book.checks.verdict import CheckFailed, disagree, refuse, require, short, stands_still
from book.trace import parting
from book.words import counted, listed

Calls = Mapping[int, Sequence[tuple[str, int, tuple[int, ...], bool]]]  # rank -> (group, number, members, done)
EXACT = 1e-12
NEARLY = 1e-9  # for losses after several updates: AdamW divides by roots of small numbers
SLIPS = {  # mistakes of a training, for which a lab gives the losses that they lead to
    "never_updated": "weights that never change: does each step update them, with the gradients of its own batch?",
    "never_cleared": "gradients that add up over the steps: clear them before each backward"}


def guilty_ranks(got: Any, calls: Calls, case: str) -> list[int]:
    """`got` must be the ranks that others wait for and that wait for nobody themselves; returns them.

    `calls[rank]` are its calls, oldest first, as (group, number, members, done).
    """
    require(isinstance(got, (list, tuple, set, frozenset)), f"{case}: return a list of ranks, not {got!r}")
    found = sorted(got)
    waits = {rank: own for rank, row in calls.items() if (own := next((call for call in row if not call[3]), None))}
    missing = _missing(waits.values(), calls)
    want = sorted(missing - waits.keys())
    if found == want:
        return want
    victims = sorted(set(found) & waits.keys() - missing)
    refuse(victims, f"{case}: rank {listed(victims[:1])} is a victim: it waits for others. Which rank has not made the "
                    "call that it waits in?")
    elsewhere = sorted(set(found) & waits.keys())
    refuse(elsewhere, f"{case}: rank {listed(elsewhere)} has not made the call that others wait in, but it waits "
                      "itself, in a call of another group: find out whom that group waits for")
    innocent = sorted(set(found) - missing)
    later = _missing((call for row in calls.values() for call in row if not call[3]), calls)
    refuse(innocent and later.issuperset(innocent), f"{case}: nobody waits for rank {listed(innocent)} yet. A rank "
           "waits in the first call that is not done, not in those after it")
    refuse(innocent, f"{case}: nobody waits for rank {listed(innocent)}, which has made every call that a member of "
                     "its groups waits in. Compare numbers within one group, and only those of its members. Don't "
                     "compare how many calls the dumps hold")
    raise CheckFailed(f"{case}: you found {found or 'nobody'}, but others also wait for rank "
                      f"{listed(sorted(set(want) - set(found)))}, which waits for nobody. Each group counts its own "
                      "calls")


def _missing(open_calls: Iterable[tuple[str, int, Sequence[int], bool]], calls: Calls) -> set[int]:
    """The members of these calls' groups that have not made the call."""
    return {rank for group, number, members, _ in open_calls for rank in members
            if max((call[1] for call in calls[rank] if call[0] == group), default=0) < number}


def state_put_back(rank: int, differs: Mapping[str, bool]) -> None:
    """After `put_back` every part must be as it was when it was saved; `differs` says which are not."""
    says = {"model": "the model's parameters are not those that were saved",
            "optimizer": "the optimizer's moments are not those that were saved: AdamW starts over, and its first "
                         "steps are larger",
            "schedule": "the schedule is not where it was: the learning rate warms up again",
            "step": "training.step is not the saved one: the run would repeat batches that it has already trained on",
            "random": "the random state is not the saved one: dropout draws different masks"}
    refuse(all(differs[part] for part in differs if part != "random"), f"rank {rank}: nothing of the training that "
           "put_back was given has been restored: change that training itself, don't make another")
    for part in {**says, **differs}:
        refuse(differs[part], f"rank {rank}: {says.get(part, f'training.{part} is not what was saved')}")


def kept_apart(changed: Sequence[str]) -> None:
    """What `state_of` returned must not change while the training goes on."""
    refuse(changed, f"what state_of returned changes with the next step ({listed(changed)}), because it refers to the "
                    "live tensors. A save written while training goes on would mix two steps: return a copy "
                    "(copy.deepcopy)")


def same_losses(got: Sequence[float], want: Sequence[float]) -> float:
    """The losses of a resumed run must equal those of one that was never stopped, to the last bit; returns their
    sum."""
    place = parting(got, want)
    if place is not None and place < min(len(got), len(want)):
        raise CheckFailed(f"loss {place} after resuming is {short(got[place])} "
                          f"(off by {got[place] - want[place]:.1g}), but in the run that was never stopped it is "
                          f"{short(want[place])}")
    require(len(got) == len(want), f"there are {len(got)} losses after resuming, not {len(want)}")
    return sum(got)


def same_batches(rows: Mapping[int, Sequence[Sequence[int]]], num_rows: int, step: int, size: int) -> list[int]:
    """The ranks' rows in a step must make the same batch for every world size; `rows[world_size][rank]` are one rank's.

    Returns the batch's rows, sorted. `size` is the number of rows in the data.
    """
    batches = {}
    for world_size, by_rank in rows.items():
        where = f"step {step} on {counted(world_size, 'rank')}"
        together = [row for own in by_rank for row in own]
        odd = next((row for row in together if type(row) is not int), None)
        require(odd is None, f"{where}: rows have the type {type(odd).__name__}: return plain ints (tolist())")
        outside = [row for row in together if not 0 <= row < size]
        refuse(outside, f"{where}: there is no row {listed(outside[:1])}: rows are numbered from 0 to {size - 1}")
        refuse(len(together) == world_size * num_rows and world_size > 1,
               f"{where}: every rank takes {num_rows} rows, so the global batch grows with the number of ranks; it "
               f"must stay at {num_rows}")
        twice = sorted({row for row in together if together.count(row) > 1})
        refuse(twice, f"{where}: row {listed(twice[:3])} is taken twice, but every row of the batch belongs to exactly "
               "one rank")
        require(len(together) == num_rows, f"{where}: together the ranks take {len(together)} rows, not {num_rows}: "
                                           "share out the remainder too")
        counts = [len(own) for own in by_rank]
        require(max(counts) - min(counts) <= 1, f"{where}: the ranks take {listed(counts)} rows, but shares may differ "
                                                "by at most one row")
        batches[world_size] = sorted(together)
    first = next(iter(batches))
    for world_size, batch in batches.items():
        require(batch == batches[first], f"step {step}: {first} and {world_size} ranks train on different rows, so a "
                                         "run that goes on with fewer ranks would see different data. Draw the batch "
                                         "from SEED and the step alone, then share it out")
    return batches[first]


def batches_differ(batches: Mapping[int, Sequence[int]]) -> None:
    """The batches of different steps must differ."""
    seen: dict[tuple[int, ...], int] = {}
    for step, batch in batches.items():
        earlier = seen.setdefault(tuple(batch), step)
        require(earlier == step, f"step {step} has the same rows as step {earlier}: seed the generator with the step "
                                 "too")


def batches_drawn(batches: Mapping[int, Sequence[int]], due: Mapping[int, Sequence[int]]) -> None:
    """The batch of each step must be the one that the exercise draws, in any order."""
    for step, batch in batches.items():
        require(list(batch) == sorted(due[step]), f"step {step}: the ranks share out the same rows for every number of "
                "ranks, but these are not the first NUM_ROWS of torch.randperm(SIZE, generator=generator(100 + step))")


def global_gradient(got: float, want: float, plain: float, world_size: int) -> None:
    """The mean of the ranks' gradients must be the gradient of the whole batch; `plain` is the mean without weights."""
    refuse(abs(got - plain) < EXACT < abs(got - want), f"on {world_size} ranks your gradient is the mean of the ranks' "
           "means, in which each row of a rank with fewer rows counts too much. Weight a rank's loss by its share of "
           "the rows, times the number of ranks, since the sum of the gradients is divided by that")
    ratio = got / want if want else float("nan")
    refuse(world_size > 1 and abs(ratio * world_size - 1) < EXACT, f"on {world_size} ranks the gradient is "
           f"{short(ratio)} times that of the batch: gradients are divided by the number of ranks, so the weights of "
           "all ranks must add up to that number, not to 1")
    hint = ("here all ranks have the same number of rows, so each weight is 1." if abs(plain - want) < EXACT else
            "does a rank with more rows weigh more?")
    require(abs(got - want) < EXACT, f"on {world_size} ranks the gradient is {short(ratio)} times that of the batch: "
            f"{hint} A rank's weight is its share of the NUM_ROWS rows, times the number of ranks")


def whole_checkpoint(got: Any, want: int | None, case: str, by: str = "latest") -> None:
    """`latest`, or the function `by`, must return the step of the last whole checkpoint, or None."""
    if got == want and type(got) is type(want):
        return
    if want is None:
        raise CheckFailed(f"{case}: {by} returns {got!r}, but there is no whole checkpoint: return None")
    if got is None:
        raise CheckFailed(f"{case}: {by} finds nothing, but step {want} was saved before: was it not written with "
                          "dcp.save, or overwritten, or moved away before the new one was whole?")
    require(isinstance(got, int), f"{case}: {by} must return the step as a whole number, not {got!r}")
    refuse(by == "load" and got == want + 1, f"{case}: load returns {got}, but the checkpoint is of step {want}: "
           "return that. It contains the steps before, so training goes on with just this number")
    refuse(got > want, f"{case}: {by} returns step {got}, but the last whole checkpoint is of step {want}: a save that "
                       "was interrupted has no .metadata, and does not count")
    raise CheckFailed(f"{case}: {by} returns step {got}, but step {want} is later, and whole too: compare steps as "
                      "numbers, not as text")


def loaded_state(got: Mapping[str, float], want: Mapping[str, float], case: str) -> float:
    """What was loaded must be what was saved, by the digest of each name; returns the digests' sum."""
    for name, value in want.items():
        have = got.get(name)
        if have is None and "optimizer" in name:
            raise CheckFailed(f"{case}: the optimizer has no {name.split()[-1]} after load: its state was not saved, "
                              "or not loaded. dcp.load fills only tensors that are there: get_state_dict makes those "
                              "of a new optimizer, its own state_dict() has none")
        require(have is not None and abs(have - value) < EXACT * max(1, abs(value)),
                f"{case}: {name} is not what was saved"
                + (": the optimizer's state was not saved, or not handed back with set_state_dict"
                   if "optimizer" in name else ": is it from another step, or was it not handed back with "
                                               "set_state_dict?"))
    return sum(want.values())


def save_failure(error: LaunchError) -> str:
    """The error of a launch that saves or loads, with a hint if it shows a known misconception."""
    message = str(error)
    raised = message + getattr(error, "traceback", "")  # torch's own words, which launch may have put into plain ones
    if "Weights only load failed" in raised or "Can't pickle" in raised:
        return ("the state may hold only dicts of tensors and numbers: put in what state_dict() returns, not the "
                f"module or the optimizer itself\n{message}")
    if isinstance(error, RankError) and error.rank > 0 and "KeyError" in message:
        return ("a rank other than rank 0 lacks a part of the state: every rank saves its own, and has its own random "
                f"state\n{message}")
    if "metadata is None" in raised:
        return ("load calls dcp.load for a checkpoint that is not there: if latest finds none, load must change "
                f"nothing and return 0\n{message}")
    if "Missing key in checkpoint state_dict" in raised:
        return ("the names in what you load differ from those that were saved: use get_state_dict for both"
                f"\n{message}")
    if disagree(error) and "dist.all_reduce(total)" in message:
        return f"{message}\nmean_loss adds up over the ranks, so every rank must call it, in each step"
    if stands_still(error) or disagree(error):
        return (f"{message}\ndcp.save, dcp.load and get_state_dict are collectives, so every rank must call them: rank "
                "0 alone can't save the shards of the others")
    return message


def save_interval(got: Any, save_s: float, node_mtbf_s: float, num_nodes: int) -> float:
    """Young's interval for a job of `num_nodes` nodes; returns it."""
    mean_s = node_mtbf_s / num_nodes
    formula = Formula(sqrt(2 * save_s * mean_s), [
        (sqrt(2 * save_s * node_mtbf_s), "that is right for a single node. A job fails when any of its nodes does, so "
                                         "its mean time between failures is one node's divided by the number of nodes"),
        (sqrt(2 * save_s * node_mtbf_s * num_nodes), "more nodes fail more often, not less often: divide by their "
         "number"),
        (sqrt(2 * save_s * node_mtbf_s) / num_nodes, "the number of nodes belongs under the root: it divides the mean "
                                                     "time between failures"),
        (sqrt(2 * save_s * node_mtbf_s / sqrt(num_nodes)), "the job fails num_nodes times as often as a node: divide "
                                                           "by num_nodes itself, not by its root"),
        (sqrt(save_s * mean_s), "a failure loses half an interval on average, not a whole one: the 2 is missing"),
        (2 * save_s * mean_s, "take the square root"),
        (mean_s, "that is how often the job fails, not how often to save"),
        (2 * sqrt(save_s * mean_s), "the 2 belongs under the root too"),
        (sqrt(2 * save_s * mean_s) - save_s, "that is Young's interval minus the time of a save, as in Daly's formula: "
                                             "return Young's"),
        (sqrt(2 * save_s * mean_s) / 60, "that is in minutes: return seconds"),
    ])
    return formula.require_right("the interval", got)


def lost_share(got: Any, save_s: float, interval_s: float, mean_s: float) -> float:
    """The share of time lost to saving and to failures, to first order; returns it."""
    formula = Formula(save_s / interval_s + interval_s / (2 * mean_s), [
        (save_s / interval_s, "that is the share lost to saving alone; work lost in failures is missing"),
        (interval_s / (2 * mean_s), "that is the share lost in failures alone; the time for saving is missing"),
        (save_s / interval_s + interval_s / mean_s, "on average a failure comes in the middle of an interval, so it "
                                                    "loses half of one"),
        (sqrt(2 * save_s / mean_s), "that is what is lost at the best interval, but the interval here is interval_s"),
        ((save_s + interval_s / 2) / mean_s, "saving takes save_s in each interval, not once per failure"),
        (save_s / interval_s + mean_s / (2 * interval_s), "the failures' part is inverted: a longer interval loses "
                                                          "more work"),
        (100 * (save_s / interval_s + interval_s / (2 * mean_s)), "that is in per cent: return a share, between 0 and "
                                                                  "1"),
        (save_s / (save_s + interval_s) + interval_s / (2 * mean_s), "to first order the share lost to saving is "
                                                                     "save_s / interval_s"),
        (save_s / interval_s + (save_s + interval_s / 2) / mean_s, "to first order a failure costs half an interval, "
                                                                   "without the time of a save"),
        (save_s / interval_s + (interval_s + save_s) / (2 * mean_s), "to first order a failure costs half an interval, "
                                                                     "without half the time of a save"),
    ])
    return formula.require_right("the lost share", got)


def trained_as_one(got: Any, want: Mapping[int, float], slips: Mapping[str, Mapping[int, float]]) -> None:
    """The losses of an undisturbed run, by step, must be those of one process that trains on the same batches.

    `slips` are the losses of one process that never updates, and of one that never clears its gradients.
    """
    require(isinstance(got, Mapping) and got, f"train must return a dict of its losses by step, not {got!r}")
    require(set(got) == set(want), f"the undisturbed run has losses for the steps {listed(sorted(got))}, but it should "
                                   f"have them for the steps 0 to {max(want)}")
    steps = sorted(want)
    place = parting([got[step] for step in steps], [want[step] for step in steps], _near)
    wrong = None if place is None else steps[place]
    refuse(wrong == 0, f"the undisturbed run's loss of step 0 is {short(got[0])}, but that of the whole batch is "
                       f"{short(want[0])}: every rank must call mean_loss with the plain loss of its rows and their "
                       "number")
    formula = Formula(want, [(losses, SLIPS[name]) for name, losses in slips.items()], _all_near)
    if wrong is not None and (said := formula.explain(got)):
        raise CheckFailed(f"the losses of the undisturbed run are those of {said}")
    require(wrong is None, f"the undisturbed run's loss of step {wrong} differs from that of one process that trains "
                           "on the same batches, so an earlier update was wrong. Is each rank's loss multiplied by its "
                           "weight? What are the gradients divided by, how often, and when are they cleared? The "
                           "weight depends on how many rows this rank has in this step")


def _near(one: float, other: float) -> bool:
    return abs(one - other) < NEARLY


def _all_near(got: Mapping[int, float], losses: Mapping[int, float]) -> bool:
    return all(_near(got[step], loss) for step, loss in losses.items())


def went_on(got: Mapping[int, float], want: Mapping[int, float], killed_at: int, every: int, num_ranks: int,
            exact: bool, saved: int | None) -> float:
    """A run that goes on after a kill before step `killed_at` must have the right losses, by step; returns the last
    one.

    They must begin at the last checkpoint and equal those of the undisturbed run, to the last bit if `exact`. At the
    end `saved` is the step of the last checkpoint.
    """
    require(isinstance(got, Mapping) and got, f"train must return a dict of its losses by step, not {got!r}")
    first, begin = min(got), killed_at // every * every
    refuse(first == 0 != begin, f"a rank was killed before step {killed_at}, and {num_ranks} ranks start again at step "
           f"0: load the last whole checkpoint, that of step {begin}, and begin with the step that load returns")
    require(first == begin, f"{num_ranks} ranks go on at step {first}, but the last checkpoint is of step {begin}")
    require(max(got) == max(want), f"the run ends with step {max(got)}, not {max(want)}"
            + ": num_steps counts from step 0, not from the checkpoint" * (max(got) == max(want) + begin))
    steps = sorted(got)
    place = parting([got[step] for step in steps], [want[step] for step in steps],
                    lambda one, other: one == other if exact else abs(one - other) < EXACT)
    if place is not None:
        step = steps[place]
        raise CheckFailed(f"after the kill, on {num_ranks} ranks, the loss of step {step} is {short(got[step])} "
                          f"(off by {got[step] - want[step]:.1g}), but in the undisturbed run it is {short(want[step])}"
                          + (". It is the first one after loading, so the weights or the data differ. Is "
                             "share called with the step's own number?" if step == first
                             else ". The first loss was right, so the update was wrong: is it the optimizer's state, "
                                  "or the weights of uneven shares?" if step == first + 1 else ""))
    last = len(want) // every * every
    require(saved == last, f"after {len(want)} steps the last checkpoint should be that of step {last}, but is that of "
            f"step {saved}: save when a step is done, under the number of the next one")
    return got[max(got)]
