"""L4: exercises whose ranks can only send and receive, graded by what the broker, outside the sandboxes, has counted.

Each rank gets its own input. What it must hold at the end, and who may send how much to whom, is decided here: expected
values never enter a sandbox.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
from nbformat import NotebookNode

from book.grading import lab as labs
from book.grading.lab import Answers, marks
from book.grading.ranks import START_S, WireRanks
from book.grading.withheld_modules import withheld_modules
from book.wire.broker import Broker, WireError, WireRun

RUN_S, HANG_S = 60, 15
LARGEST = 1 << 50  # sums of up to 8 such numbers are exact in float64, and no smaller type can hold one
Arrays = Sequence[np.ndarray]
Message = tuple[int, int, int]


@dataclass(frozen=True)
class Wired:
    """An exercise over the broker: what each rank calls, in which cases, what it must hold, which messages are allowed.

    `call` leaves its result in `buffer`; it may use the case's names. `want` returns each rank's expected result, NaN
    where any value is allowed. `traffic` returns what is wrong with the messages, or None.
    """
    call: str
    cases: Sequence[Mapping[str, int]]
    want: Callable[[Arrays, Mapping[str, int]], Arrays]
    traffic: Callable[[Sequence[Message], Mapping[str, int]], str | None]


def verdict(lab: NotebookNode, exercise: int, answers: Answers | None, ranks: WireRanks) -> str | None:
    """Why an exercise's answers do not do what its `wire` mark asks for; None if they do or there is no such mark.

    `answers` None stands for the lab's own solutions. Raises WireError if a rank fails, WireTimeout if ranks wait for
    one another or take too long; any text from a rank is untrusted.
    """
    names = [marks(cell)["wire"] for cell in labs.checks(lab, exercise) if marks(cell).get("wire")]
    if not names:
        return None
    cells = [cell for cell in labs.job(lab, exercise, None, answers).cells if marks(cell)["kind"] != "check"]
    head = list(takewhile(lambda cell: marks(cell)["kind"] != "learner", cells))
    sources = [[cell.source for cell in part] for part in (head, cells[len(head):])]
    without = withheld_modules(lab, exercise) if ranks.sandboxed else []
    try:
        return next(filter(None, (_run(WIRED[name], *sources, ranks, without) for name in names)), None)
    except WireError:
        ranks.end()  # their state is unknown
        ranks.check()
        raise


def _run(wired: Wired, head: Sequence[str], sources: Sequence[str], ranks: WireRanks,
         without: Sequence[Path]) -> str | None:
    rng = np.random.default_rng()  # unseeded: these numbers never have to be reproduced
    connections = ranks.connect(max(case["world_size"] for case in wired.cases), head, without)
    with ExitStack() as stack:
        for connection in connections:
            stack.enter_context(closing(connection))
        broker = Broker(connections)
        broker.start(sources, START_S)
        for case in wired.cases:
            size = case["world_size"]
            inputs = [rng.integers(-LARGEST, LARGEST, case["length"]).astype(float) for _ in range(size)]
            tasks = [{**case, "rank": rank, "call": wired.call} for rank in range(size)]
            run = broker.run(tasks, [x.tobytes() for x in inputs], RUN_S, HANG_S)
            wrong = _wrong(wired, case, inputs, run)
            if wrong:
                return f"over a wire that only sends and receives, with {size} ranks: {wrong}"
    return None


def _wrong(wired: Wired, case: Mapping[str, int], inputs: Arrays, run: WireRun) -> str | None:
    for rank, want in enumerate(wired.want(inputs, case)):
        try:
            got = np.frombuffer(run.results[rank])
        except ValueError:
            return f"rank {rank}'s result is not an array of numbers"
        if got.shape != want.shape or not np.array_equal(got[~np.isnan(want)], want[~np.isnan(want)]):
            return f"rank {rank} does not hold what it should"
    return wired.traffic(run.messages, case)


def ring(messages: Sequence[Message], case: Mapping[str, int], rounds: int, ways: Sequence[int] = (1, -1),
         num_chunks: int | None = None) -> str | None:
    """A ring's traffic: each rank sends to one neighbour, all in the same direction, and at most a chunk in each round.

    `num_chunks` is how many chunks a buffer has; None means one per rank.
    """
    size, length = case["world_size"], case["length"]
    steps = {(dst - src) % size for src, dst, _ in messages}
    if messages and steps not in [{way % size} for way in ways]:
        return "messages go to ranks other than one neighbour"
    counts = Counter(src for src, _, _ in messages)
    if any(counts[rank] != rounds for rank in range(size)):
        wrong = next(counts[rank] for rank in range(size) if counts[rank] != rounds)
        return f"a rank sends {wrong} messages, where a ring has {rounds} rounds"
    most = -(-length // (num_chunks or size)) * 8
    if any(num_bytes > most for _, _, num_bytes in messages):
        return "a message is larger than a chunk"
    return None


def reduced_chunk(inputs: Arrays, case: Mapping[str, int]) -> Arrays:
    """After a ring's reduce-scatter rank r holds the sum of chunk r + 1."""
    total, want = sum(inputs), []
    parts = np.array_split(np.arange(case["length"]), case["world_size"])
    for rank in range(case["world_size"]):
        chunk = parts[(rank + 1) % case["world_size"]]
        want.append(np.full(case["length"], np.nan))
        want[-1][chunk] = total[chunk]
    return want


def gathered_chunks(inputs: Arrays, case: Mapping[str, int]) -> Arrays:
    """After a ring's all-gather every rank has chunk r + 1 of rank r, for all r."""
    parts = np.array_split(np.arange(case["length"]), case["world_size"])
    whole = np.empty(case["length"])
    for rank, x in enumerate(inputs):
        chunk = parts[(rank + 1) % case["world_size"]]
        whole[chunk] = x[chunk]
    return [whole] * case["world_size"]


def from_the_left(inputs: Arrays, case: Mapping[str, int]) -> Arrays:
    """After an exchange each rank has what its left-hand neighbour had."""
    return [inputs[rank - 1] for rank in range(case["world_size"])]


def copies_of_root(inputs: Arrays, case: Mapping[str, int]) -> Arrays:
    """After a broadcast every rank has the root's buffer."""
    return [inputs[case["root"]]] * case["world_size"]


def received_once(messages: Sequence[Message], case: Mapping[str, int]) -> str | None:
    """Every rank but the root receives one copy, whole or in parts; the root receives less than one."""
    got = Counter()
    for _, dst, num_bytes in messages:
        got[dst] += num_bytes
    copy, root = case["length"] * 8, case["root"]
    others = (got[rank] == copy for rank in range(case["world_size"]) if rank != root)
    return None if all(others) and got[root] < copy else "a rank receives more or less than it needs"


def rows_of_all(inputs: Arrays, case: Mapping[str, int]) -> Arrays:
    """After an all-gather every rank has all ranks' rows, one after the other."""
    return [np.concatenate(inputs)] * case["world_size"]


def transposed(inputs: Arrays, case: Mapping[str, int]) -> Arrays:
    """After an all-to-all row s of rank d is the former row d of rank s."""
    rows = [x.reshape(case["world_size"], -1) for x in inputs]
    return [np.concatenate([row[rank] for row in rows]) for rank in range(case["world_size"])]


def rows_sent(messages: Sequence[Message], case: Mapping[str, int]) -> str | None:
    """Every rank sends its rows for the others, and at most twice as much in all: rows may be forwarded."""
    sent, others = Counter(), case["length"] // case["world_size"] * (case["world_size"] - 1) * 8
    for src, _, num_bytes in messages:
        sent[src] += num_bytes
    if all(others <= sent[rank] <= 2 * others for rank in range(case["world_size"])):
        return None
    return "a rank sends less than its rows for the others, or more than twice as much"


STEPS = "chunks = list(buffer.tensor_split(world_size))\nfor step in range(world_size - 1):\n    {}(chunks, step)"
SIZES = ({"world_size": 4, "length": 44}, {"world_size": 3, "length": 20}, {"world_size": 4, "length": 43})
WIRED: dict[str, Wired] = {
    "ring_reduce_scatter": Wired(STEPS.format("reduce_scatter_step"), SIZES, reduced_chunk,
                                 lambda messages, case: ring(messages, case, case["world_size"] - 1)),
    "ring_all_gather": Wired(STEPS.format("all_gather_step"), SIZES, gathered_chunks,
                             lambda messages, case: ring(messages, case, case["world_size"] - 1)),
    "ring_all_reduce": Wired("ring_all_reduce(buffer)", SIZES, lambda inputs, case: [sum(inputs)] * len(inputs),
                             lambda messages, case: ring(messages, case, 2 * (case["world_size"] - 1))),
    "exchange": Wired("incoming = torch.zeros_like(buffer)\nexchange(buffer, incoming)\nbuffer = incoming",
                      ({"world_size": 4, "length": 8}, {"world_size": 3, "length": 8}, {"world_size": 2, "length": 8}),
                      from_the_left, lambda messages, case: ring(messages, case, 1, ways=(1,), num_chunks=1)),
    "broadcast": Wired("broadcast(buffer, root)",
                       ({"world_size": 4, "length": 10, "root": 2}, {"world_size": 3, "length": 10, "root": 0},
                        {"world_size": 5, "length": 7, "root": 4}), copies_of_root, received_once),
    "all_gather": Wired("out = buffer.new_zeros(world_size, length)\nall_gather(out, buffer)\nbuffer = out.flatten()",
                        ({"world_size": 4, "length": 6}, {"world_size": 3, "length": 5}), rows_of_all,
                        lambda messages, case: None),  # any sends and receives are allowed
    "all_to_all": Wired("incoming = torch.zeros(world_size, length // world_size).double()\n"
                        "all_to_all(incoming, buffer.view(world_size, -1))\nbuffer = incoming.flatten()",
                        ({"world_size": 4, "length": 24}, {"world_size": 3, "length": 15}), transposed, rows_sent),
}
