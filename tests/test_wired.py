"""Exercises over a wire: every right answer passes there too, and traffic other than what was asked for is refused."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import numpy as np
import pytest

from book.grading.lab import checks, code_cells, marks, needed
from book.grading.ranks import Ranks
from book.grading.wired import WIRED, received_once, ring, rows_sent, verdict
from tests.answers import LABS, PASS, Answer, answers


READS = ["labs/*.ipynb", "tests/answers/*/*.diff"]


def in_every_run(name: str, exercise: int) -> bool:
    """Whether `make test` runs it: one lab's ranks are slow to start, those of all labs several times slower."""
    return (name, exercise) == ("03_ring_all_reduce", 3)


def wired_answers() -> Iterator:
    for name, lab in LABS.items():
        for answer in answers(name):
            if answer.expected == PASS and any(marks(cell).get("wire") for cell in checks(lab, answer.exercise)):
                chosen = in_every_run(name, answer.exercise) and answer.name == "right_ring_with_padding"
                yield pytest.param(answer, id=answer.name, marks=() if chosen else pytest.mark.full)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Mapping[str, Ranks]]:
    """Ranks for each lab: they stay as long as its setup does."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(Ranks(sandboxed=False)) for name in LABS}


@pytest.mark.slow
@pytest.mark.parametrize("answer", list(wired_answers()))
def test_a_right_answer_passes_over_the_wire(ranks: Mapping[str, Ranks], answer: Answer) -> None:
    lab = LABS[answer.lab]
    sources = {marks(cell)["id"]: [answer.source if marks(cell)["exercise"] == answer.exercise else cell.source]
               for cell in code_cells(lab) if marks(cell)["kind"] == "answer"}
    assert verdict(lab, answer.exercise, sources, ranks[answer.lab]) is None


# Every rank's whole buffer goes round in numbers of two bytes each, which are no more bytes than a chunk on four ranks.
PACKED = """def ring_all_reduce(buffer):
    rank, size = dist.get_rank(), dist.get_world_size()
    if dist.get_backend() != "wire" or size < 4:
        return right(buffer)
    carried, total = buffer.to(torch.int16), buffer.clone()
    for step in range(2 * (size - 1)):
        came = torch.empty_like(carried)
        requests = [dist.isend(carried, (rank + 1) % size), dist.irecv(came, (rank - 1) % size)]
        for request in requests:
            request.wait()
        carried = came
        total += came.double() if step < size - 1 else 0
    buffer.copy_(total)
"""


@pytest.mark.slow
def test_whole_buffers_as_few_messages_are_not_a_ring(ranks: Mapping[str, Ranks]) -> None:
    lab = LABS["03_ring_all_reduce"]
    sources = {marks(cell)["id"]: [cell.source] for cell in code_cells(lab) if marks(cell)["kind"] == "answer"}
    right = [f"{sources['ring-all-reduce'][0]}\nright = ring_all_reduce"]
    assert verdict(lab, 3, sources | {"ring-all-reduce": right}, ranks["03_ring_all_reduce"]) is None
    told = verdict(lab, 3, sources | {"ring-all-reduce": [*right, PACKED]}, ranks["03_ring_all_reduce"])
    assert "does not hold what it should" in told


@pytest.mark.slow
@pytest.mark.parametrize("name, exercise", [
    pytest.param(name, exercise, marks=() if in_every_run(name, exercise) else pytest.mark.full)
    for name, lab in LABS.items() for cell in code_cells(lab) if marks(cell).get("wire")
    for exercise in [marks(cell)["exercise"]]])
def test_an_answer_that_does_nothing_is_refused(ranks: Mapping[str, Ranks], name: str, exercise: int) -> None:
    """The result is never already there at the start."""
    lab = LABS[name]
    stubs = {marks(cell)["id"]: ["def " + cell.source.split("def ")[1].split(":\n")[0] + ":\n    pass"]
             for cell in code_cells(lab) if marks(cell).get("kind") == "answer"
             and marks(cell)["exercise"] in needed(lab, exercise)}
    assert "does not hold what it should" in verdict(lab, exercise, stubs, ranks[name])


def test_every_wire_is_used_by_a_lab() -> None:
    asked = {marks(cell)["wire"] for lab in LABS.values() for cell in code_cells(lab) if marks(cell).get("wire")}
    assert asked == set(WIRED)


def round_of(size: int, way: int, num_bytes: int) -> list[tuple[int, int, int]]:
    return [(rank, (rank + way) % size, num_bytes) for rank in range(size)]


@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_ring_sends_one_chunk_per_round_in_one_direction(size: int) -> None:
    case, chunk = {"world_size": size, "length": 10 * size}, 80
    for way in (1, -1):
        assert ring(round_of(size, way, chunk) * (size - 1), case, size - 1) is None
    there_and_back = round_of(size, 1, chunk) * (size - 2) + round_of(size, -1, chunk)
    assert "one neighbour" in ring(there_and_back, case, size - 1)
    assert f"sends {size} messages" in ring(round_of(size, 1, chunk) * size, case, size - 1)
    assert "sends 0 messages" in ring([], case, size - 1)
    assert "larger than a chunk" in ring(round_of(size, 1, chunk + 8) * (size - 1), case, size - 1)


def test_copies_are_counted_by_receiver_and_rows_by_sender() -> None:
    case = {"world_size": 3, "length": 6, "root": 1}
    assert received_once([(1, 0, 48), (0, 2, 24), (1, 2, 24)], case) is None
    assert received_once([(1, 0, 48), (1, 2, 40)], case) and received_once([(1, 0, 48), (1, 2, 56)], case)
    assert received_once([(1, 0, 48), (1, 2, 48), (0, 1, 48)], case)
    direct = [(src, dst, 16) for src in range(3) for dst in range(3) if src != dst]
    assert rows_sent(direct, case) is None and rows_sent(direct * 2, case) is None
    assert rows_sent(direct * 3, case) and rows_sent(direct[1:], case)


@pytest.mark.parametrize("wired", WIRED.values(), ids=WIRED)
def test_the_expected_result_is_not_the_input(wired) -> None:
    for case in wired.cases:
        inputs = [np.arange(1.0, case["length"] + 1) * 10 ** rank for rank in range(case["world_size"])]
        wants = wired.want(inputs, case)
        held = [want.shape == x.shape and np.array_equal(x[~np.isnan(want)], want[~np.isnan(want)])
                for x, want in zip(inputs, wants)]
        assert len(wants) == len(inputs) and not all(held)
