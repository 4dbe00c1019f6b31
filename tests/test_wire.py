"""Ranks that only send and receive: frames, the broker that counts them, and the exercises that run there."""
from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
import psutil
import pytest

from book.grading.lab import checks, code_cells, marks, needed
from book.grading.ranks import WireRanks
from book.grading.wired import WIRED, received_once, ring, rows_sent, verdict
from book.wire.broker import Broker, WireError, WireRun
from book.wire.frames import ANY, DONE, RECV, RESULT, SEND, Frame, Unpacker, packed, receive
from tests.answers import LABS, PASS, Answer, answers



PROGRAM = '''
import torch
import torch.distributed as dist


def others():
    return dist.get_rank(), dist.get_world_size()


def shift(buffer):
    rank, size = others()
    came = torch.empty_like(buffer)
    transfers = [dist.P2POp(dist.isend, buffer, (rank + 1) % size), dist.P2POp(dist.irecv, came, (rank - 1) % size)]
    for request in dist.batch_isend_irecv(transfers):
        request.wait()
    buffer.copy_(came)


def shift_with_isend(buffer):
    rank, size = others()
    came = torch.zeros(len(buffer), dtype=torch.float32)
    request = dist.isend(buffer.float(), (rank + 1) % size)
    dist.recv(came, (rank - 1) % size)
    request.wait()
    assert request.is_completed()
    buffer.copy_(came)


def all_send_first(buffer):
    rank, size = others()
    dist.send(buffer, (rank + 1) % size)
    dist.recv(buffer, (rank - 1) % size)


def sizes_differ(buffer):
    rank, size = others()
    dist.send(buffer, 1) if rank == 0 else dist.recv(buffer[:2], 0) if rank == 1 else None


def meet_and_shift(buffer):
    dist.barrier()
    shift(buffer)
    dist.barrier()


def one_does_not_come(buffer):
    if dist.get_rank() != 1:
        dist.barrier()


def never_waited(buffer):
    if dist.get_rank() == 0:
        dist.isend(buffer, 1)


def refused(buffer):
    calls = [lambda: dist.all_reduce(buffer), lambda: dist.broadcast(buffer, 0),
             lambda: dist.all_gather([buffer] * 3, buffer), lambda: dist.reduce_scatter_tensor(buffer[:1], buffer[:3])]
    for number, call in enumerate(calls):
        try:
            call()
        except RuntimeError as error:
            told = "can only send and receive", "No backend type associated"  # the second is torch's own
            assert any(words in str(error) for words in told), (number, error)
        else:
            raise AssertionError(f"call {number} was not refused")
    buffer.fill_(1)


def gather_from_any(buffer):
    rank, size = others()
    if rank:
        dist.send(buffer, 0)
        return
    took = dist.recv(came := torch.empty_like(buffer))
    request = dist.irecv(torch.empty_like(buffer), 3 - took)
    request.wait()
    buffer[:2] = torch.tensor([came[0], 10. * took])


def leaves(buffer):
    raise SystemExit(0)
'''


@pytest.fixture(scope="module")
def ranks() -> Iterator[WireRanks]:
    """Ranks that serve every test, and remember nothing of the previous one."""
    with WireRanks(sandboxed=False) as ranks:
        yield ranks


HEAD, BODY = PROGRAM.split("\n\n\n", 1)  # another head needs new ranks, which import torch for seconds


@pytest.fixture
def broker(ranks: WireRanks) -> Iterator[Broker]:
    """Three ranks that have run PROGRAM, with its imports as the head."""
    broker = Broker(ranks.connect(3, [HEAD], []))
    broker.start([BODY], timeout_s=120)
    yield broker
    for rank in broker.ranks:
        rank.connection.close()


def ask(broker: Broker, call: str, length: int = 4):
    inputs = [np.arange(length) + 10.0 * rank for rank in range(3)]
    tasks = [{"rank": rank, "world_size": 3, "call": call} for rank in range(3)]
    run = broker.run(tasks, [x.tobytes() for x in inputs], timeout_s=60, hang_s=5)
    return inputs, [np.frombuffer(run.results[rank]) for rank in range(3)], run.messages


@pytest.mark.slow
def test_messages_arrive_and_are_counted(broker: Broker) -> None:
    for call, element_bytes in (("shift(buffer)", 8), ("shift_with_isend(buffer)", 4), ("shift(buffer)", 8),
                                ("meet_and_shift(buffer)", 8)):
        inputs, results, messages = ask(broker, call)
        assert [r.tolist() for r in results] == [inputs[rank - 1].tolist() for rank in range(3)]
        assert sorted(messages) == [(rank, (rank + 1) % 3, 4 * element_bytes) for rank in range(3)]


@pytest.mark.slow
def test_a_receive_from_any_rank_returns_the_sender(broker: Broker) -> None:
    _, (root, *_), messages = ask(broker, "gather_from_any(buffer)")
    assert root[0] == root[1] > 0 and sorted(messages) == [(1, 0, 32), (2, 0, 32)]


# Cells as notebooks have them: IPython runs them, some of them fail, and the answer needs some of them.
OTHER_CELLS = ["%matplotlib inline", "%time doubled = 2", "%%time\ntripled = 3", "kept?", "files = !echo one two",
               "import asyncio\nawait asyncio.sleep(0)\nwaited = 5", "display(In[0])", "%no_such_magic", "1 / 0",
               "def broken(:", "assert False, 'a trial that fails'", "raise SystemExit", "input()", "Out.get(0)",
               "%%capture printed\nprint('seven')", "%env MARK=11"]
USES_THEM = """import os
def product(buffer):
    display("shown nowhere")
    assert str(printed) == "seven\\n" and len(files) == 1 and os.environ["MARK"] == "11"
    buffer *= doubled * tripled * waited"""


@pytest.mark.slow
def test_cells_run_as_in_ipython_and_a_failing_one_changes_nothing(ranks: WireRanks) -> None:
    broker = Broker(ranks.connect(3, [HEAD], []))
    broker.start(["kept = 1", *OTHER_CELLS, USES_THEM], timeout_s=120)
    inputs, results, _ = ask(broker, "product(buffer)")
    assert all((30 * given == got).all() for given, got in zip(inputs, results))
    with pytest.raises(WireError, match=r"NameError: .*'nowhere'.* \(line 1: nowhere\(buffer\)\); before that a cell "
                                        r"failed: UsageError: Line magic function `%no_such_magic` not found"):
        ask(broker, "nowhere(buffer)")
    for rank in broker.ranks:
        rank.connection.close()


@pytest.mark.slow
def test_there_are_no_collectives(broker: Broker) -> None:
    _, results, messages = ask(broker, "refused(buffer)")
    assert not messages and [r.tolist() for r in results] == [[1.0] * 4] * 3


@pytest.mark.slow
@pytest.mark.parametrize("call, said", [
    ("all_send_first(buffer)", "wait for one another: .*rank 1 sends to rank 2"),
    ("sizes_differ(buffer)", "rank 0 sends 32 bytes where rank 1 receives 16"),
    ("never_waited(buffer)", "wait for every request"),
    ("leaves(buffer)", "SystemExit"),
    ("one_does_not_come(buffer)", "wait for one another: rank . is at a barrier, rank . is at a barrier"),
    ("nothing_of_the_kind(buffer)", "NameError.*nothing_of_the_kind"),
    ("dist.send(buffer, 7)", "failed|can't send")])
def test_failures_are_reported(broker: Broker, call: str, said: str) -> None:
    with pytest.raises(WireError, match=said):
        ask(broker, call)


def run_on(ranks: WireRanks, head: list[str], *sources: str, num_ranks: int = 2) -> set[int]:
    """Runs sources on ranks and returns the ids of the processes that these ranks were forked from."""
    connections = ranks.connect(num_ranks, head, [])
    Broker(connections).start(sources, timeout_s=120)
    for connection in connections:
        connection.close()
    return {rank.process.pid for rank in ranks.ranks}


@pytest.mark.slow
def test_a_run_does_not_affect_the_next_one(ranks: WireRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, patched modules, threads, processes: each run is forked from ranks that have run only the head."""
    head = ["import os, subprocess, threading, time, torch", "kept = 1"]
    before = {rank.process.pid for rank in ranks.ranks}
    first = run_on(ranks, head, "torch.add = None", "kept = 2",
                   "threading.Thread(target=time.sleep, args=(600,)).start()",
                   "subprocess.Popen(['sleep', '600.0625'])")
    assert not first & before, "a different head needs new ranks"
    checked = "assert kept == 1 and torch.add is not None"
    assert run_on(ranks, head, checked, "os._exit = lambda _: time.sleep(600)") == first
    assert not [one for one in psutil.process_iter(["cmdline"]) if "600.0625" in (one.info["cmdline"] or [])]
    monkeypatch.setattr("book.grading.ranks.NEXT_S", 1)
    assert not run_on(ranks, head, "assert os._exit.__name__ == '_exit'") & first, "these did not let go"


@pytest.mark.slow
def test_a_failing_setup_is_reported_with_its_line(ranks: WireRanks) -> None:
    with pytest.raises(WireError, match=r"rank . failed: ZeroDivisionError: .* \(line 2: half = 1 / 0\)"):
        run_on(ranks, ["import os\nhalf = 1 / 0"], "print(half)", num_ranks=1)


def test_frames_survive_any_split_of_the_bytes() -> None:
    frames = [Frame(SEND, 2, 7, b"abc"), Frame(RECV, 1, 8, expects=5), Frame(DONE, 0, 7, b"")]
    data = b"".join(map(packed, frames))
    for cut in range(1, len(data)):
        unpacker = Unpacker()
        got = [frame for start in range(0, len(data), cut) for frame in unpacker.feed(data[start:start + cut])]
        assert [(f.kind, f.peer, f.request, f.payload) for f in got] == [f[:4] for f in frames]
        assert got[1].expects == 5
    with pytest.raises(ValueError, match="invalid message"):
        Unpacker().feed(b"\xff" * 40)


def in_every_run(name: str, exercise: int) -> bool:
    """Whether `make test` runs it: one lab's ranks are slow to start, those of all labs several times slower."""
    return (name, exercise) == ("03_ring_all_reduce", 3)


def wired_answers() -> Iterator:
    for name, lab in LABS.items():
        for answer in answers(name):
            if answer.expected == PASS and any(marks(cell).get("wire") for cell in checks(lab, answer.exercise)):
                chosen = in_every_run(name, answer.exercise) and answer.name == "right_ring_with_padding"
                yield pytest.param(answer, id=answer.name, marks=() if chosen else pytest.mark.slow)


@pytest.fixture(scope="module")
def of_labs() -> Iterator[Mapping[str, WireRanks]]:
    """Ranks for each lab: they stay as long as its setup does."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(WireRanks(sandboxed=False)) for name in LABS}


@pytest.mark.slow
@pytest.mark.parametrize("answer", list(wired_answers()))
def test_a_right_answer_passes_over_the_wire(of_labs: Mapping[str, WireRanks], answer: Answer) -> None:
    lab = LABS[answer.lab]
    sources = {marks(cell)["id"]: [answer.source if marks(cell)["exercise"] == answer.exercise else cell.source]
               for cell in code_cells(lab) if marks(cell)["kind"] == "answer"}
    assert verdict(lab, answer.exercise, sources, of_labs[answer.lab]) is None


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
def test_whole_buffers_as_few_messages_are_not_a_ring(of_labs: Mapping[str, WireRanks]) -> None:
    lab = LABS["03_ring_all_reduce"]
    sources = {marks(cell)["id"]: [cell.source] for cell in code_cells(lab) if marks(cell)["kind"] == "answer"}
    right = [f"{sources['ring-all-reduce'][0]}\nright = ring_all_reduce"]
    assert verdict(lab, 3, sources | {"ring-all-reduce": right}, of_labs["03_ring_all_reduce"]) is None
    told = verdict(lab, 3, sources | {"ring-all-reduce": [*right, PACKED]}, of_labs["03_ring_all_reduce"])
    assert "does not hold what it should" in told


@pytest.mark.slow
@pytest.mark.parametrize("name, exercise", [
    pytest.param(name, exercise, marks=() if in_every_run(name, exercise) else pytest.mark.slow)
    for name, lab in LABS.items() for cell in code_cells(lab) if marks(cell).get("wire")
    for exercise in [marks(cell)["exercise"]]])
def test_an_answer_that_does_nothing_is_refused(of_labs: Mapping[str, WireRanks], name: str, exercise: int) -> None:
    """The result is never already there at the start."""
    lab = LABS[name]
    stubs = {marks(cell)["id"]: ["def " + cell.source.split("def ")[1].split(":\n")[0] + ":\n    pass"]
             for cell in code_cells(lab) if marks(cell).get("kind") == "answer"
             and marks(cell)["exercise"] in needed(lab, exercise)}
    assert "does not hold what it should" in verdict(lab, exercise, stubs, of_labs[name])


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


Ends = tuple[Broker, list[socket.socket]]


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """A broker, and the ends of its connections that ranks would have."""
    pairs = [socket.socketpair() for _ in range(getattr(request, "param", 2))]
    yield Broker([own for own, _ in pairs]), [other for _, other in pairs]
    for end in (end for pair in pairs for end in pair):
        end.close()


def run(broker: Broker) -> WireRun:
    return broker.run([{}, {}], [b"", b""], timeout_s=20, hang_s=10)


@pytest.mark.parametrize("left", [Frame(SEND, 1, 1, b"data"), Frame(RECV, 1, 1, expects=4)])
def test_a_rank_that_returns_with_half_a_transfer_is_reported(ends: Ends, left: Frame) -> None:
    broker, (first, second) = ends
    first.sendall(packed(left) + packed(Frame(RESULT, payload=b"0")))
    second.sendall(packed(Frame(RESULT, payload=b"1")))
    with pytest.raises(WireError, match="a rank returned before its transfers were done"):
        run(broker)


def test_completed_transfers_are_recorded_and_results_come_back(ends: Ends) -> None:
    broker, (first, second) = ends
    first.sendall(packed(Frame(SEND, 1, 1, b"data")) + packed(Frame(RESULT, payload=b"0")))
    second.sendall(packed(Frame(RECV, 0, 1, expects=4)) + packed(Frame(RESULT, payload=b"1")))
    found = run(broker)
    assert found.messages == [(0, 1, 4)] and found.results == {0: b"0", 1: b"1"}


@contextmanager
def serving(ends: Ends) -> Iterator[WireRun]:
    """A broker that serves three ranks meanwhile; at the end all ranks return. Gives what it has recorded so far."""
    broker, ranks = ends
    server = threading.Thread(target=broker.run, args=([{}] * 3, [b""] * 3, 20, 10))
    server.start()
    try:
        while not hasattr(broker, "done"):
            time.sleep(0.01)
        yield broker.done
    finally:
        for rank in ranks:
            rank.sendall(packed(Frame(RESULT)))
        server.join()


def answers_at(end: socket.socket, count: int) -> list[tuple[int, int, bytes]]:
    """The (request, sender, message) of the broker's answers to a rank, in order; the rank's task comes before them."""
    unpacker, found = Unpacker(), []
    end.settimeout(10)
    while len(found) < 1 + count:
        found += receive(end, unpacker)
    return [(frame.request, frame.peer, frame.payload) for frame in found[1:]]


@pytest.mark.parametrize("ends", [3], indirect=True)
def test_a_receive_from_any_rank_yields_to_earlier_receives_that_name_the_sender(ends: Ends) -> None:
    _, (zero, one, two) = ends
    with serving(ends) as run:
        for number, peer in enumerate((2, ANY, ANY)):
            zero.sendall(packed(Frame(RECV, peer, number, expects=1)))
        one.sendall(packed(Frame(SEND, 0, 1, b"a")) + packed(Frame(SEND, 0, 2, b"b")))
        assert answers_at(zero, 2) == [(1, 1, b"a"), (2, 1, b"b")]
        two.sendall(packed(Frame(SEND, 0, 1, b"c")))
    assert run.messages == [(1, 0, 1), (1, 0, 1), (2, 0, 1)]


@pytest.mark.parametrize("ends", [3], indirect=True)
def test_a_receive_from_any_rank_takes_the_earliest_waiting_message(ends: Ends) -> None:
    broker, (zero, one, two) = ends
    with serving(ends):
        for rank, number, message in ((two, 2, b"c"), (one, 1, b"a")):
            rank.sendall(packed(Frame(SEND, 0, 1, message)))
            while not broker.sends.get((number, 0)):
                time.sleep(0.01)
        zero.sendall(packed(Frame(RECV, ANY, 1, expects=1)) + packed(Frame(RECV, ANY, 2, expects=1)))
        assert answers_at(zero, 2) == [(1, 2, b"c"), (2, 1, b"a")]
