"""Flight Recorder's dumps: written by real ranks that hang, read, merged into a trace, and the guilty rank found."""
import json
from dataclasses import replace
from pathlib import Path

import pytest

from book.launch import HangError, RankError, launch
from book.look.dumps import FORMAT
from book.record import flight
from book.trace import TraceError
from book.widgets import play

ON = {"TORCH_FR_BUFFER_SIZE": "20"}


def hanging(folder, fault):
    """Three ranks that call the same things, but for one of them."""
    import threading

    import torch
    import torch.distributed as dist

    from book.launch import rank_device
    from book.record import flight

    rank_device()
    dist.init_process_group()
    rank, x = dist.get_rank(), torch.ones(4)
    if fault == "absent":
        import torch._inductor.codecache
    pair = dist.new_group([0, 1])
    for _ in range(30 if fault == "many" else 2):
        dist.all_reduce(x)
    watchdog = threading.Timer(0.7, flight.dump, [f"{folder}/{rank}.json", fault == "absent"])
    watchdog.daemon = True
    watchdog.start()
    if rank == 1 and fault == "other":
        dist.broadcast(x, 0)
    if rank == 0 and fault == "pair":
        dist.all_reduce(x, group=pair)
    if rank == 1 and fault in ("absent", "many"):
        return watchdog.join()
    dist.all_reduce(x[:2].clone())


def flights_of(folder, fault, **options):
    with pytest.raises(HangError):
        launch(hanging, 3, str(folder), fault, env=ON, hang_s=2, timeout_s=40, check_calls=False, **options)
    return flight.read(sorted(Path(folder).glob("*.json"), reverse=True))


def dumped(*ranks):
    """Flights as ranks would dump them: for each rank its calls, as (op, is it done)."""
    members = tuple(range(len(ranks)))
    return [flight.FlightDump(rank, len(ranks), "gloo", tuple(
        flight.Call("0", members, k + 1, op, f"{op}(float [4])", 16, 100 * k + rank, done, "")
        for k, (op, done) in enumerate(calls))) for rank, calls in enumerate(ranks)]


@pytest.mark.slow
def test_the_rank_that_never_called_is_found(tmp_path):
    flights = flights_of(tmp_path, "absent")
    assert flight.guilty(flights) == (1,)
    assert flight.verdict(flights) == ("ranks 0, 2 wait in call 3, all_reduce(float [2]): "
                                       "dist.all_reduce(x[:2].clone()); "
                                       "rank 1's last is call 2, all_reduce(float [4]): dist.all_reduce(x)")
    trace = flight.trace(flights)
    calls = [(event.rank, event.step, event.op, event.num_bytes) for event in trace.of_kind("collective")]
    assert calls == [(rank, step, "all_reduce", 16) for step in (0, 1) for rank in range(3)] + [
        (0, 2, "all_reduce", 8), (2, 2, "all_reduce", 8)]
    assert trace.hangs == flight.verdict(flights) and trace.backend == "gloo"
    held = {(event.rank, event.chunk): event.contributions for event in trace.of_kind("hold")}
    assert held[1, 1] == (1, 1, 1) and held[1, 2] == (0, 0, 0) and held[2, 2] == (0, 0, 1)
    assert str(play(trace)).startswith("What every rank's chunks hold: player, 3 ranks, 3 steps")


@pytest.mark.slow
def test_the_rank_that_calls_another_thing_is_found(tmp_path):
    flights = flights_of(tmp_path, "other")
    assert flight.guilty(flights) == (1,)
    assert "rank 1 waits in call 3, broadcast(float [4])" in flight.verdict(flights)


@pytest.mark.slow
def test_a_rank_that_waits_in_another_group_is_not_the_guilty_one(tmp_path):
    flights = flights_of(tmp_path, "pair")
    assert {call.ranks for call in flights[0].calls} == {(0, 1, 2), (0, 1)}
    assert flight.guilty(flights) == (), "each waits for another one"
    assert flight.verdict(flights).startswith(
        "rank 0 waits in call 1 of group 1, all_reduce(float [4]); ranks 1, 2 wait in call 3 of group 0")


@pytest.mark.slow
def test_calls_that_a_buffer_has_dropped_are_left_out(tmp_path):
    flights = flights_of(tmp_path, "many")
    assert flight.guilty(flights) == (1,) and flights[0].calls[0].number > 1
    events = flight.trace(flights).of_kind("collective")
    assert {event.rank for event in events if event.step == 0} == {0, 1, 2}
    assert max(len(own.calls) for own in flights) == 20 and len(events) < 60


def dumps_at_once(folder):
    """A rank that dumps after one call."""
    import torch
    import torch.distributed as dist

    from book.record import flight
    dist.init_process_group()
    dist.all_reduce(torch.ones(4))
    flight.dump(f"{folder}/0.json")


@pytest.mark.slow
def test_the_recorder_is_on_unless_it_is_switched_off(tmp_path):
    launch(dumps_at_once, 1, str(tmp_path))
    (only,) = flight.read(tmp_path.glob("*.json"))
    assert [call.op for call in only.calls] == ["all_reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("name", flight.SIZES)
def test_a_dump_without_the_recorder_says_how_to_switch_it_on(tmp_path, name):
    with pytest.raises(RankError, match="set TORCH_FR_BUFFER_SIZE=2000 before the ranks start"):
        launch(dumps_at_once, 1, str(tmp_path), env={name: "0"})


def test_ranks_that_are_done_leave_no_verdict():
    flights = dumped([("all_reduce", True)], [("all_reduce", True)])
    assert flight.verdict(flights) is None and flight.guilty(flights) == ()


def test_a_call_that_is_done_at_once_but_differs_is_guilty():
    flights = dumped([("all_reduce", False)], [("barrier", True)], [("all_reduce", False)])
    assert flight.guilty(flights) == (1,)
    assert flight.verdict(flights).endswith("rank 1's call 1 was barrier(float [4])")


def test_on_nccl_the_rank_whose_call_is_only_queued_is_guilty_though_all_have_made_it():
    """What watchdogs dump with TORCH_NCCL_ENABLE_TIMING=1: rank 1's GPU is still at what it was given before."""
    flights = [replace(one, calls=(replace(one.calls[0], started=one.rank != 1),))
               for one in dumped(*[[("all_reduce", False)]] * 3)]
    assert flight.guilty(flights) == (1,)
    queued = [replace(one, calls=(replace(one.calls[0], started=False),)) for one in flights]
    assert flight.guilty(queued) == (), "without the starts nobody can tell"


def test_of_a_chain_of_waiting_ranks_the_one_that_waits_for_nobody_is_guilty():
    pairs = [[(0, 1)], [(1, 2)], []]  # rank 0 waits for rank 1, which waits for rank 2
    flights = [flight.FlightDump(rank, 3, "gloo", tuple(
        flight.Call(str(pair), pair, 1, "all_reduce", "all_reduce(float [4])", 16, 0, False, "") for pair in own))
        for rank, own in enumerate(pairs)]
    assert flight.guilty(flights) == (2,)
    assert flight.verdict(flights).endswith("rank 2 has made no call in this group")


def test_a_rank_without_any_call_is_named():
    flights = dumped([("all_reduce", False)], [])
    assert flight.guilty(flights) == (1,)
    assert flight.verdict(flights).endswith("rank 1 has made no call in this group")


def test_files_that_are_no_dumps_or_not_of_all_ranks_are_refused(tmp_path):
    path = tmp_path / "0.json"
    path.write_text(json.dumps({"format": FORMAT, "rank": 0, "world_size": 2, "backend": "gloo", "calls": []}))
    with pytest.raises(TraceError, match="no dump of rank 1"):
        flight.read([path])
    with pytest.raises(TraceError, match="from rank 0, and so is another file"):
        flight.read([path, path])
    with pytest.raises(TraceError, match="can't be read"):
        flight.read([tmp_path / "nowhere.json"])
    path.write_text('{"format": "other"}')
    with pytest.raises(TraceError, match="not a dump that flight.dump wrote"):
        flight.read([path])
