"""Ranks that can only send and receive: the broker forwards, counts and reports errors; collectives are refused."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from book.grading.ranks import Ranks
from book.wire.broker import Broker, WireError
from book.wire.frames import DONE, RECV, SEND, Frame, Unpacker, packed

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
def ranks() -> Iterator[Ranks]:
    """Ranks that serve every test, and remember nothing of the previous one."""
    with Ranks(sandboxed=False) as ranks:
        yield ranks


HEAD, BODY = PROGRAM.split("\n\n\n", 1)  # another head needs new ranks, which import torch for seconds


@pytest.fixture
def broker(ranks: Ranks) -> Iterator[Broker]:
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
def test_cells_run_as_in_ipython_and_a_failing_one_changes_nothing(ranks: Ranks) -> None:
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


def run_on(ranks: Ranks, head: list[str], *sources: str, num_ranks: int = 2) -> set[int]:
    """Runs sources on ranks and returns the ids of the processes that these ranks were forked from."""
    connections = ranks.connect(num_ranks, head, [])
    Broker(connections).start(sources, timeout_s=120)
    for connection in connections:
        connection.close()
    return {rank.process.pid for rank in ranks.ranks}


@pytest.mark.full
def test_a_run_does_not_affect_the_next_one(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_failing_setup_is_reported_with_its_line(ranks: Ranks) -> None:
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
