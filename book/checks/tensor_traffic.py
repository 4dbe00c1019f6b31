"""L3, lab 5: what a split module sends, and how many parameters and bytes a split block takes."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from book.checks.verdict import number, require, short
from book.trace import Event, Trace


def split_traffic(trace: Trace, wanted: Mapping[str, int | None], num_bytes: int) -> int:
    """Each rank must issue, in each phase, `wanted[phase]` all-reduces of `num_bytes`, and nothing else.

    Barriers end the phases; None stands for any traffic. Returns the bytes that a rank gave to all-reduces in the
    phases that are counted.
    """
    for rank in range(trace.world_size):
        phases: list[list[Event]] = [[]]
        for event in trace.of_rank(rank):
            if event.op == "barrier":
                phases.append([])
            elif event.kind in ("collective", "send", "recv"):
                phases[-1].append(event)
        require(len(phases) == len(wanted), f"rank {rank} came to {len(phases) - 1} barriers, the check has "
                f"{len(wanted) - 1}: leave dist.barrier() out of your code, collectives need none")
        for (phase, num), events in zip(wanted.items(), phases):
            if num is not None:
                _check_phase(f"{phase}, rank {rank}", events, num, num_bytes)
    return num_bytes * sum(num or 0 for num in wanted.values())


def vocabulary_traffic(traces: Mapping[int, Trace], num_predictions: int) -> float:
    """What a rank sends must be the same for each vocabulary size of `traces`, and none of it point to point.

    Returns the bytes that a rank gives to collectives, for each prediction.
    """
    sent = {size: max(sum(event.num_bytes or 0 for event in trace.of_rank(rank) if event.kind in ("collective", "send"))
                      for rank in range(trace.world_size)) for size, trace in traces.items()}
    (small, few), (large, many) = min(sent.items()), max(sent.items())
    require(many <= few, f"with {small} tokens a rank gives {short(few)} bytes to collectives, with {large} tokens "
            f"{short(many)}: logits are sent round. A prediction takes three numbers, its largest logit, its sum of "
            "exponentials and the logit of its target, whatever V is")
    return many / num_predictions


def block_count(answer: Any, width: int, mlp_width: int, num_ranks: int, num_tokens: int,
                element_bytes: int) -> tuple[float, float]:
    """`answer` must be (parameters that a rank holds of one split block, bytes that it gives to all-reduces); returned.

    Cut are the weights, and the biases of maps that are cut by columns, (4 D^2 + 2 D M + 3 D + M) / R; whole are two
    norms and two biases, 6 D. Each of two sums is D numbers a token, forward and backward.
    """
    require(isinstance(answer, (tuple, list)) and len(answer) == 2,
            f"return two numbers, parameters and bytes, not {type(answer).__name__}")
    weights, biases, whole = 4 * width**2 + 2 * width * mlp_width, 3 * width + mlp_width, 6 * width
    everything, num_bytes = weights + biases + whole, 4 * num_tokens * width * element_bytes
    return (number("the number of parameters", answer[0], (weights + biases) / num_ranks + whole, [
        (everything, "that is the whole block"),
        (everything / num_ranks,
         "not everything is cut: norms, and the biases of the maps that are cut by rows, are whole on every rank"),
        ((everything - 4 * width) / num_ranks + 4 * width,
         "the biases of the maps that are cut by rows are whole on every rank, as they are added to the whole sum"),
        ((everything - 2 * width) / num_ranks + 2 * width, "the norms are whole on every rank"),
        ((everything - 5 * width) / num_ranks + 5 * width,
         "one bias too much is cut: out and down add theirs to the whole sum, so both are whole"),
        (weights / num_ranks + biases + whole, "the biases of the maps that are cut by columns are cut with them"),
        ((weights + 3 * width) / num_ranks + mlp_width + whole, "the bias of up is cut as its outputs are"),
        ((weights + mlp_width) / num_ranks + 3 * width + whole,
         "the biases of q, k and v are cut as their outputs are"),
        ((weights + biases) / num_ranks + 4 * width,
         "2 D are missing: a block has two norms, and whole biases in out and down"),
        ((weights + biases) / num_ranks + 2 * width, "that is without the norms"),
        (weights / num_ranks + 4 * width, "that is without any biases"),
        (weights / num_ranks, "that is the weights alone: norms and biases are parameters too"),
    ]), number("the number of bytes", answer[1], num_bytes, [
        (num_bytes / 2, "that is half: there is one after attention and one after the MLP, and backward has as many"),
        (num_bytes / 4, "that is a single all-reduce: attention and MLP make one each, forward and backward"),
        (num_bytes / element_bytes, f"that counts numbers: each has {element_bytes} bytes"),
        (num_bytes / num_ranks, "every rank gives the whole activation, not a part of it"),
        (num_bytes * mlp_width / width, "what is added up is as wide as the block's output, not as the hidden layer"),
        (num_bytes * 2 * (num_ranks - 1) / num_ranks, "that is what a ring sends; asked for is what goes in"),
    ]))


def _check_phase(where: str, events: Sequence[Event], num: int, num_bytes: int) -> None:
    needless = ("and nothing has to be sent: each rank has all that its own part takes" if num == 0 else
                "and one all-reduce of what the ranks' parts give is all: what goes into a cut by rows is cut already, "
                "so nothing is gathered or handed round before")
    for event in events:
        require(event.op == "all_reduce" and num, f"{where}: your code calls {event.op or event.kind}, {needless}")
    require(len(events) <= num, f"{where}: {len(events)} all-reduces where {num} will do: add up what the ranks' parts "
            "give once, at the end; and let x through its operator once, for all that use it")
    require(len(events) == num, f"{where}: {len(events)} all-reduces where {num} should be: what brings the ranks' "
            "parts together?")
    for event in events:
        require(event.num_bytes == num_bytes, f"{where}: an all-reduce of {short(event.num_bytes or 0)} bytes, "
                f"{short(num_bytes)} are enough: send the sum itself, in its own dtype, and nothing beside it")
