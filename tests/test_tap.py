"""The tap sees every call to torch.distributed once, in any program, and tells all who read its log the same."""
import os
import sys
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from book import record, tap
from book.launch import launch
from book.tap import place
from book.tap.group import _in_world
from book.tap.log import LENGTH, NOBODY, Log, Op, OwnGroup, Subscriber
from book.tap.place import variables
from tests.by_value import sent_by_value

sent_by_value(__name__)

WORLD = OwnGroup("0", (0, 1), "cpu:gloo", 0)


def seen(ops):
    """Each call as (kind, function, number, whether it is a part of another)."""
    return [(op.kind, op.function, op.number, op.inside) for op in ops]


class Reader(Subscriber):
    """Keeps all that it is told."""

    def __init__(self):
        self.told = []

    def before(self, op):
        self.told.append(("before", op))

    def issued(self, op, tensors):
        self.told.append(("issued", op))

    def waited(self, op, source_rank):
        self.told.append(("waited", op))

    def withdrawn(self, op):
        self.told.append(("withdrawn", op))


def in_a_plain_program(rank, program, answers, port, starts_late):
    if not starts_late:
        tap.start()
    dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)
    tap.start()
    answers[rank] = program(rank)
    dist.destroy_process_group()


def plainly(program, tmp_path, starts_late=False):
    """What `program(rank)` returns on two ranks that no `launch` has started."""
    with multiprocessing.Manager() as manager:
        answers = manager.dict()
        multiprocessing.start_processes(in_a_plain_program, (program, answers, tmp_path / "store", starts_late), 2,
                                        start_method="fork")
        return [answers[rank] for rank in range(2)]


def trains_and_gathers(rank):
    model = DDP(nn.Linear(4, 4))
    before = len(tap.ops())
    model(torch.ones(2, 4)).sum().backward()
    dist.all_gather_object([None] * 2, "x")
    pair = dist.new_group([0, 1])
    dist.broadcast(torch.ones(2), 1, group=pair)
    request = (dist.isend, dist.irecv)[rank](torch.ones(2), 1 - rank)
    open_before = [op.waited for op in tap.ops()[-1:]]
    request.wait()
    ops = tap.ops()[before:]
    return seen(ops), open_before, ops[-1].waited, [op.place and os.path.basename(op.place[0]) for op in ops]


GATHERED = [("all_gather_object", "all_gather_object", 5, False), ("all_gather", "all_gather_object", 6, True),
            ("all_gather", "all_gather_object", 7, True), ("new_group", "new_group", 8, False),
            ("broadcast", "broadcast", 1, False)]


@pytest.mark.slow
def test_a_plain_program_is_seen_with_what_ddp_calls_from_cpp(tmp_path):
    for rank, (ops, open_before, waited, places) in enumerate(plainly(trains_and_gathers, tmp_path)):
        message = ("recv" if rank else "send", "irecv" if rank else "isend", 1, False)
        assert ops == [("all_reduce", None, 4, False), *GATHERED, message]
        assert open_before == [False] and waited and set(places) == {"test_tap.py"}


@pytest.mark.slow
def test_started_after_the_groups_it_sees_what_python_calls(tmp_path):
    for ops, _, waited, _ in plainly(trains_and_gathers, tmp_path, starts_late=True):
        assert [kind for kind, *_ in ops][:-1] == [kind for kind, *_ in GATHERED] and waited


def shards(rank):
    from torch.distributed.fsdp import fully_shard
    model = fully_shard(nn.Linear(8, 8))
    before = len(tap.ops())
    model(torch.ones(2, 8)).sum().backward()
    return [(op.kind, op.num_bytes) for op in tap.ops()[before:]]


@pytest.mark.slow
def test_fsdp_is_seen(tmp_path):
    for ops in plainly(shards, tmp_path):
        assert ops == [("all_gather", 288), ("reduce_scatter", 288)]


def follows_shards():
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group()
    model = fully_shard(nn.Linear(8, 8))
    for _ in range(2):
        with record.follow_backward(model):
            model(torch.ones(2, 8)).sum().backward()
    return model.weight.grad is not None


@pytest.mark.slow
def test_a_followed_backward_of_fsdp_goes_on_where_gloo_has_no_future():
    run = launch(follows_shards, 2, record=True)
    assert list(run) == [True, True]
    done = [event.op for event in run.trace.events if event.rank == 0 and event.kind == "collective" and event.end_s]
    assert done.count("reduce_scatter") == 2


def calls_often(rank):
    readers = [Reader(), Reader()]
    for reader in readers:
        tap.subscribe(reader)
    x = torch.ones(1)
    for _ in range(LENGTH):
        dist.all_reduce(x)
    with pytest.raises(RuntimeError):
        dist.all_gather([x, torch.ones(2)], x)
    tap.unsubscribe(readers[1])
    dist.barrier()
    same = [one is other and what == that for (what, one), (that, other) in zip(readers[0].told, readers[1].told)]
    return len(tap.ops()), all(same), [len(reader.told) for reader in readers], [
        (what, op.kind, op.withdrawn) for what, op in readers[0].told[-6:]]


@pytest.mark.slow
def test_the_log_stays_short_and_all_readers_see_the_same_calls(tmp_path):
    for length, same, told, last in plainly(calls_often, tmp_path):
        assert length == LENGTH and same and told == [3 * LENGTH + 6, 3 * LENGTH + 3]
        assert last == [*[(what, "all_gather", True) for what in ("before", "issued", "withdrawn")],
                        *[(what, "barrier", False) for what in ("before", "issued", "waited")]]


class Refuses(Subscriber):
    """Refuses every broadcast."""

    def before(self, op):
        if op.kind == "broadcast":
            raise ValueError("not this one")


def is_refused(rank):
    refuses, reader = Refuses(), Reader()
    tap.subscribe(refuses)
    tap.subscribe(reader)
    with pytest.raises(ValueError, match="not this one"):
        dist.broadcast(torch.ones(1), 0)
    dist.barrier()
    tap.stop()
    dist.all_reduce(torch.ones(1))
    return [(what, op.kind) for what, op in reader.told]


@pytest.mark.slow
def test_a_subscriber_may_refuse_a_call_and_after_stop_nobody_is_told(tmp_path):
    assert plainly(is_refused, tmp_path) == [[("before", "barrier"), ("issued", "barrier"), ("waited", "barrier")]] * 2


def test_importing_it_changes_nothing_in_torch_and_stop_puts_all_back():
    names = ("ProcessGroup", "new_group", "get_group_rank", "all_gather_object")
    before = [getattr(dist.distributed_c10d, name) for name in names]
    tap.start()
    tap.start()
    assert [getattr(dist.distributed_c10d, name) for name in names] != before
    tap.stop()
    assert [getattr(dist.distributed_c10d, name) for name in names] == before
    assert not hasattr(DDP, "__del__")


def test_a_peer_outside_the_group_is_noted_as_given():
    pair = OwnGroup("1", (2, 1), "gloo", 2)
    assert [_in_world(pair, peer) for peer in (0, 1, 2, -1, None)] == [2, 1, NOBODY, NOBODY, None]


def test_a_reader_is_told_once_and_only_what_it_asks_for():
    log, reader, op = Log(), Reader(), Op("barrier", "barrier", WORLD, 1, None)
    for _ in range(2):
        log.subscribe(reader)
    threads = [threading.Thread(target=log.write, args=(op,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reader.told) == 8 and op.serial == 8 and log.issued and not log.named


def test_to_read_variables_keeps_nothing_alive_and_empties_nobody_s_dictionary():
    model = nn.Linear(1, 1)
    left, frame = weakref.ref(model), sys._getframe()
    assert variables(frame, ["model", "missing"]) == [model, None]
    del model
    assert left() is None
    own = locals()
    assert variables(frame, ["frame"]) == [frame] and own["left"] is left
    assert namespace_of_a_class().left == 1


def namespace_of_a_class():
    class Body:
        left = 1
        read = variables(sys._getframe(), ["left"])
    assert Body.read == [1]
    return Body


def waited_with_a_limit(rank):
    dist.init_process_group()
    works = [dist.all_reduce(torch.ones(2), async_op=True),
             dist.isend(torch.ones(2), 1) if rank == 0 else dist.irecv(torch.ones(2), 0)]
    return [work.wait(timeout=timedelta(seconds=30)) for work in works]


def test_the_line_of_a_frame_is_the_one_that_python_tells(monkeypatch):
    """Of code that comes and goes as well: another function may then be where one was in memory."""
    monkeypatch.setattr(place, "MOST_CODE", 50)
    for number in range(300):
        names = {}
        exec(f"{'pass;' * number}\n" + "\n" * (number % 7) + "def some():\n yield 1\n\n yield 2\n", names)
        steps = names["some"]()
        for _ in steps:
            line = steps.gi_frame.f_lineno
            assert [place.place_in(steps.gi_frame)[1] for _ in range(2)] == [line, line]
    assert len(place._places) <= 50


def test_every_reduction_has_its_own_name():
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    plain = [getattr(dist.ReduceOp, name) for name in names]
    ops = [Op("all_reduce", None, OwnGroup("0", (0,), "", 0), 1, None, reduced_with=reduction)
           for each in plain for reduction in (each, dist.ReduceOp(each))]
    for _ in range(2):
        assert [op.reduces for op in ops] == [name for name in names for _ in range(2)]
    assert Op("send", None, OwnGroup("0", (0,), "", 0), 1, None).reduces is None


@pytest.mark.slow
def test_requests_are_waited_for_with_a_time_limit():
    assert all(all(done) for done in launch(lambda: waited_with_a_limit(int(os.environ["RANK"])), 2))
