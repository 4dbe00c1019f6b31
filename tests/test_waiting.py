"""What a run that hangs is said to wait for, from facts about its ranks: causes, who waits for whom, the words."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from book.waiting.causes import CAUSES, causes
from book.waiting.counts import out_of_step
from book.waiting.doing import Doing, Kind
from book.waiting.hang import Child, CollectiveCall, Dropped, Group, Hang, Standing, Worker
from book.waiting.history import CallSite, Condition, Handler, History, Model, SiteCall
from book.waiting.message import graph
from book.waiting.standstill import DEAD, STOPPED, WAITS, Common, WaitFor, standstill, waits_told
from book.words import counted, named, rounded


def doing(kind: Kind, *fields: object, **others: object) -> Standing:
    """A rank that does this and nothing else."""
    return Standing(Doing(kind, *fields, **others))


def waits_in(operation: str, peer: int | None = None) -> Standing:
    """A rank that waits in a collective, or in a send or receive with a peer."""
    return doing(Kind.CALL, operation, peer, "dst" if "send" in operation else "src")


FINISHED, COMPUTES = doing(Kind.FINISHED), doing(Kind.COMPUTES)


def _call(number: int, name: str = "all_reduce") -> CollectiveCall:
    return CollectiveCall(number, name, place=f"code.py line {number}")


@pytest.mark.parametrize("num_ranks", [2, 5, 64])
def test_ranks_that_miss_a_collective_in_the_same_way_share_a_sentence(num_ranks: int) -> None:
    ranks = [waits_in("all_reduce"), *[FINISHED] * (num_ranks - 2), doing(Kind.RETURNED)]
    last = {0: _call(3), **{rank: _call(2) for rank in range(1, num_ranks)}}
    said, = causes(Hang(ranks, {Group("0", tuple(range(num_ranks))): last}))
    assert said.startswith("rank 0 waits in all_reduce(); rank") and said.count("returned without it") == 1
    others = {2: "rank 1", 5: "ranks 1, 2, 3, 4", 64: "ranks 1-63"}[num_ranks]
    assert f" {others} returned" in said


def test_nothing_is_blamed_where_all_ranks_are_in_the_same_collective() -> None:
    in_the_same = {Group("0", (0, 1, 2)): dict.fromkeys(range(3), _call(4))}
    assert causes(Hang([waits_in("all_reduce")] * 3, in_the_same)) == []
    assert causes(Hang([COMPUTES] * 3, {})) == []


def test_a_rank_that_computes_is_named_where_the_others_wait_for_it() -> None:
    said, = causes(Hang([waits_in("barrier"), COMPUTES, COMPUTES], {Group("0", (0, 1, 2)): {0: _call(1, "barrier")}}))
    assert said == "rank 0 waits in barrier(); ranks 1, 2 compute instead (last call in this group: none)"


def test_each_rank_that_has_dropped_requests_at_a_line_is_named_once() -> None:
    dropped = [Dropped("isend", peer, "cell line 4: dist.isend(x, peer)") for peer in (1, 2)]
    ranks = [waits_in("recv", 1)._replace(dropped=dropped), waits_in("recv", 0), FINISHED._replace(dropped=dropped[:1])]
    said, = causes(Hang(ranks, {}))
    assert said.startswith("ranks 0, 2 did not keep what isend returned")
    assert said.endswith("Look at cell line 4: dist.isend(x, peer)")


def test_a_dropped_request_whose_message_nobody_waits_for_is_not_the_cause() -> None:
    dropped = [Dropped("isend", 1, "cell line 4: dist.isend(x, 1)")]
    said, = causes(Hang([FINISHED._replace(dropped=dropped), waits_in("recv", 2), FINISHED], {}))
    assert said == "rank 1 waits in recv from rank 2, which has returned"


def test_a_rank_that_has_destroyed_a_group_is_named_unless_it_has_ended() -> None:
    pair, world = Group("1", (0, 1)), Group("0", (0, 1, 2))
    calls = {pair: {0: _call(1, "barrier")}, world: {1: _call(1, "barrier"), 2: _call(1, "barrier")}}
    destroyed = {"destroyed": {pair: "code.py line 5"}}
    said, = causes(Hang([waits_in("barrier"), waits_in("barrier")._replace(**destroyed), waits_in("barrier")], calls))
    assert said.startswith("rank 0 waits in barrier(); rank 1 has destroyed that group without calling it")
    assert said.endswith("Look at code.py line 5")
    said, = causes(Hang([waits_in("barrier"), FINISHED._replace(**destroyed)], {pair: calls[pair]}))
    assert "rank 1 returned without it" in said


def test_each_cause_says_what_it_looks_for() -> None:
    looks = [look for row in CAUSES for look in row]
    assert len(set(looks)) == len(looks) and all(look.__doc__ for look in looks)


def test_ranks_in_a_collective_wait_for_those_that_have_not_called_it() -> None:
    last, waits = {rank: _call(1, "barrier") for rank in (0, 2)}, waits_in("barrier")
    hang = Hang([waits, FINISHED, waits, COMPUTES], {Group("0", (0, 1, 2, 3)): last})
    assert hang.waits == {0: (1, 3), 2: (1, 3)} and hang.awaited == {1, 3}
    assert graph(hang.waits) == "ranks 0, 2 wait for ranks 1, 3"


def test_ranks_in_messages_and_calls_wait_for_their_peers() -> None:
    ranks = [waits_in("send", 2)._replace(worker=Worker("worker0", 16)),
             doing(Kind.CALL, "rpc_sync", worker="worker0"), doing(Kind.REQUEST, "irecv", 1, "src")]
    hang = Hang(ranks, {})
    assert hang.waits == {0: (2,), 1: (0,), 2: (1,)} and hang.awaited == set()
    assert graph(hang.waits) == "rank 0 waits for rank 2; rank 1 waits for rank 0; rank 2 waits for rank 1"


def _line(number: int, **around: object) -> CallSite:
    return CallSite(f"code.py line {number}", number, **around)


def _history(*lines: CallSite, is_done: bool = False) -> History:
    """The history of a rank that has called these lines, one after the other."""
    made = tuple(SiteCall(line, "all_reduce") for line in lines)
    return History(len(made), dict(Counter(made)), made, is_done)


def _told(histories: Sequence[History], models: Sequence[Sequence[Model]] = ((), ())) -> list[str]:
    """What is said of two ranks, of which the first waits in its last call, and the other has returned."""
    group = Group("0", (0, 1))
    ranks = [standing._replace(calls={group: history}, models=own)
             for standing, history, own in zip((waits_in("all_reduce"), FINISHED), histories, models)]
    calls = {rank: _call(history.total)._replace(done=history.is_done) for rank, history in enumerate(histories)}
    return causes(Hang(ranks, {group: calls}))[1:]


def test_a_line_that_one_rank_has_called_more_often_is_told_with_its_loop() -> None:
    line = _line(3, loop="for name in losses")
    said, = _told([_history(*[line] * 9), _history(*[line] * 6, is_done=True)])
    assert said == ("rank 0 has called all_reduce 9 times, rank 1 only 6 times, at code.py line 3: compare what "
                    "`for name in losses` goes over on each rank")


def test_the_first_call_at_different_lines_is_told_unless_ranks_have_a_branch_each() -> None:
    first, second, third = _line(3), _line(4), _line(5)
    said, = _told([_history(first, second, first, second, first), _history(first, first, second, first)])
    assert said.startswith("ranks 0 and 1 are out of step since call 2 of this group: rank 0 made it at code.py line 4")
    branches = [_history(second, first, second, first, first), _history(third, first, third, first)]
    assert _told(branches) == ["rank 0 has called all_reduce 3 times, rank 1 only 2 times, at code.py line 3"]


def test_a_condition_is_told_if_the_rank_has_had_as_many_batches() -> None:
    first, line = _line(3), _line(4, condition=Condition("under", "if rank == 0"))
    histories = [_history(first, line), _history(first)]
    assert _told(histories) == ["rank 0 has come once to code.py line 4, under `if rank == 0`, rank 1 never"]
    said, = _told(histories, [[Model(3, {_line(1): 3})], [Model(2, {_line(1): 2})]])
    assert said.startswith("rank 0 has run the DDP model on 3 batches, rank 1 on only 2, at code.py line 1: give all")


def test_calls_of_a_rank_that_can_not_tell_them_are_not_counted() -> None:
    """The board has its last call: it has made some, and it is not known at which lines."""
    group, line = Group("0", (0, 1)), _line(4, condition=Condition("under", "if flag"))
    waits, stopped = waits_in("all_reduce")._replace(calls={group: _history(*[line] * 5)}), doing(Kind.STOPPED)
    hang = Hang([waits, stopped], {group: {0: _call(5), 1: _call(4)}})
    assert [*out_of_step(hang)] == []
    assert [*out_of_step(Hang(hang.ranks, {group: {0: _call(5)}}))] == [
        "rank 0 has come 5 times to code.py line 4, under `if flag`, rank 1 never"]


def test_a_call_of_ones_own_under_a_condition_is_told_before_forwards_that_follow_from_it() -> None:
    """While rank 0 evaluates, rank 1 goes on to its next batch."""
    made = SiteCall(_line(9), "all_reduce", "DDP", True)
    evaluates = _line(4, condition=Condition("under", "if main"))
    histories = [_history(_line(3), evaluates), History(1, {made: 1}, (made,), None)]
    assert _told(histories, [[Model(0, {})], [Model(2, {_line(8): 2})]]) == [
        "rank 0 has come once to code.py line 4, under `if main`, rank 1 never"]


def test_an_error_that_was_caught_between_two_lines_is_told_unless_a_condition_explains_it() -> None:
    handler = Handler("except MemoryError", "code.py line 9")
    for condition, num_said in ((None, True), (Condition("under", "if loss > 0"), False)):
        first = _line(3, handler=handler, block=2)
        last = _line(4, handler=handler, block=2, condition=condition)
        told = _told([_history(first, last, first, last), _history(first, last, first)])
        assert any("has caught an error in between, and `except MemoryError` goes on at code.py line 9" in said
                   for said in told) == num_said


@pytest.mark.parametrize(("loop", "num", "is_told"), [("", 4, True), ("for batch in loader", 4, False), ("", 3, False)])
def test_a_line_behind_a_loop_that_a_rank_never_came_to_is_told_if_its_loop_ended(loop: str, num: int,
                                                                                  is_told: bool) -> None:
    handler = Handler("except OSError", "code.py line 9")
    step, last = (_line(number, loop=head, handler=handler, block=2)
                  for number, head in ((3, "for x in data"), (4, loop)))
    said = _told([_history(*[step] * 4, last), _history(*[step] * num, is_done=True)])
    assert any(f"rank 1 has come {num} times to code.py line 3, but never to code.py line 4: it has caught an error"
               in each for each in said) == is_told


def test_a_loop_that_a_rank_may_leave_by_itself_is_told_beside_uneven_batches() -> None:
    line = _line(3, leaves="if loss > best: break")
    said, = _told([_history(line, line), _history(line)], [[Model(3, {line: 3})], [Model(2, {line: 2})]])
    assert said.endswith("train inside `with model.join():`; if `if loss > best: break` has ended the loop, have all "
                         "ranks decide alike, as by an all_reduce")


@pytest.mark.parametrize(("owner", "in_backward"), [("FSDP", False), ("FSDP", True), ("DTensor", False)])
def test_forwards_of_a_sharded_model_that_some_ranks_have_not_run_are_counted(owner: str, in_backward: bool) -> None:
    made, own = SiteCall(_line(3), "all_gather_single", owner, in_backward), SiteCall(_line(9), "barrier")
    said = _told([History(4, {made: 3, own: 1}, (own,), None), History(2, {made: 2}, (made,), None)])
    assert said == ["rank 0 has come 3 times to code.py line 3, rank 1 only 2 times: a forward gathers all ranks' "
                    "shards, so all must run equally many"] * (owner == "FSDP" and not in_backward)


def test_a_lock_that_a_worker_process_waits_for_may_have_been_held_when_it_was_forked() -> None:
    loads = doing(Kind.OTHER, "DataLoader")
    said = [causes(Hang([loads._replace(children=[Child("worker process 0", its, "code.py line 3")])], {}))
            for its in (Doing(Kind.LOCK), Doing(Kind.LOCK, "lock.acquire()"))]
    assert said == [["rank 0 waits in DataLoader, and its worker process 0 waits for a lock, which nobody there "
                     "releases if a thread of the rank held it at the fork, at code.py line 3"],
                    ["rank 0 waits in DataLoader, and its worker process 0 waits in lock.acquire() at code.py line 3"]]


def test_messages_that_do_not_add_up_are_counted() -> None:
    ranks = [FINISHED._replace(messages={("send", 1): 2}), waits_in("recv", 0)._replace(messages={("recv", 0): 3})]
    assert causes(Hang(ranks, {}))[1] == "rank 0 has called send for 2 messages to rank 1, which has called recv for 3"


def test_ranks_that_have_sent_the_wrong_way_round_are_told_so() -> None:
    ranks = [waits_in("recv", (rank + 1) % 3)._replace(sent=[((rank + 1) % 3, "code.py line 4")]) for rank in range(3)]
    said, = causes(Hang(ranks, {}))
    assert said.startswith("ranks 0, 1, 2 wait in recv for one another") and said.endswith("Look at code.py line 4")


@pytest.mark.parametrize(("standing", "done", "waits"), [
    (waits_in("all_reduce"), None, True), (waits_in("all_reduce"), True, False), (waits_in("recv", 1), False, False),
    (doing(Kind.ITEM), False, False), (doing(Kind.REQUEST), False, True)])
def test_a_rank_waits_in_its_last_collective_unless_it_is_done_or_the_rank_waits_for_something_else(
        standing: Standing, done: bool | None, waits: bool) -> None:
    hang = Hang([standing, FINISHED], {Group("0", (0, 1)): {0: _call(3)._replace(done=done), 1: _call(2)}})
    assert bool(hang.missing) == waits


@pytest.mark.parametrize(("standing", "one", "several"), [
    (waits_in("recv", 1), "waits in recv from rank 1", "wait in recv from rank 1"),
    (waits_in("recv", -1), "waits in recv from any rank", "wait in recv from any rank"),
    (doing(Kind.REQUEST, "isend", 2, "dst"), "waits for its isend to rank 2", "wait for their isend to rank 2"),
    (doing(Kind.POLLS, "irecv", 2, "src"), "polls its irecv from rank 2", "poll their irecv from rank 2"),
    (doing(Kind.STOPPED), "is stopped by a signal (SIGSTOP)", "are stopped by a signal (SIGSTOP)"),
    (doing(Kind.DEAF), "does not answer", "do not answer"),
    (doing(Kind.RETURNED), "has returned, and its result is on its way",
     "have returned, and their results are on their way"),
    (doing(Kind.KEYS, keys=("a", "b")), *(f"wait{s} for the keys 'a', 'b' of the store" for s in ("s", ""))),
    (FINISHED, "finished", "finished")])
def test_what_several_ranks_do_is_said_in_the_plural(standing: Standing, one: str, several: str) -> None:
    assert (standing.main.words(), standing.main.words(2)) == (one, several)


@pytest.mark.parametrize("kind", Kind)
def test_each_way_not_to_wait_has_words(kind: Kind) -> None:
    assert Doing(kind).waits or not Doing(kind).words().startswith("wait")


def test_long_runs_of_ranks_are_written_as_a_range() -> None:
    assert [named(ranks) for ranks in ([2], [0, 1], [0, 1, 2, 3, 4, 6])] == ["rank 2", "ranks 0, 1", "ranks 0-4, 6"]


def test_a_standstill_tells_each_rank_its_waits_and_what_all_had_done() -> None:
    """Rank 3 waits in another group for rank 4, which is stopped; rank 1 is dead, whatever it did last."""
    world, pair = Group("0", (0, 1, 2, 3, 4)), Group("1", (3, 4))
    ranks = [waits_in("all_reduce"), waits_in("recv", 4), waits_in("recv", 1), waits_in("barrier"),
             doing(Kind.STOPPED)]
    last = {0: _call(7), 1: _call(6)._replace(arguments="x"), 2: _call(6), 3: _call(6), 4: _call(6)}
    found = standstill(Hang(ranks, {world: last, pair: {3: _call(2, "barrier"), 4: _call(1)}}), dead={1})
    assert [stand.state for stand in found.stands] == [WAITS, DEAD, WAITS, WAITS, STOPPED]
    assert [stand.waits for stand in found.stands] == [
        (WaitFor("all_reduce", (1, 2, 3, 4)),), (), (WaitFor("recv", (1,)),), (WaitFor("barrier", (4,)),), ()]
    assert found.stands[1].does == "is dead: its process is gone"
    assert found.common == Common(world, 6, "all_reduce(x)")
    assert waits_told(found.stands) == (
        "rank 0 waits for ranks 1, 2, 3, 4; rank 2 waits for rank 1; rank 3 waits for rank 4")


def test_ranks_in_different_calls_wait_for_one_another() -> None:
    world, alike = Group("0", (0, 1, 2)), {rank: _call(5)._replace(done=False) for rank in range(3)}
    ranks = [waits_in("all_reduce"), waits_in("barrier"), waits_in("all_reduce")]
    other = {**alike, 1: _call(5, "barrier")._replace(done=False)}
    assert waits_told(standstill(Hang(ranks, {world: other})).stands) == (
        "ranks 0, 2 wait for rank 1; rank 1 waits for ranks 0, 2")
    uneven = {rank: _call(5, "all_to_all_single")._replace(done=False, arguments=f"float32 [{rank}]")
              for rank in range(3)}
    for same in (alike, uneven):
        assert not any(stand.waits for stand in standstill(Hang(ranks, {world: same})).stands)


def test_what_all_had_done_is_of_another_group_where_that_which_hangs_has_done_nothing() -> None:
    world, pair = Group("0", (0, 1, 2)), Group("1", (0, 1))
    calls = {pair: {0: _call(1)}, world: dict.fromkeys(range(3), _call(9)._replace(done=True))}
    found = standstill(Hang([waits_in("all_reduce"), COMPUTES, COMPUTES], calls))
    assert found.common == Common(world, 9, "all_reduce()")
    assert standstill(Hang([waits_in("all_reduce"), COMPUTES, COMPUTES], {pair: {0: _call(1)}})).common is None
    under_way = {world: dict.fromkeys(range(3), _call(9)._replace(done=False))}
    assert standstill(Hang([waits_in("all_reduce")] * 3, under_way)).common == Common(world, 8, "a collective")


def _of_ddp(number: int, count: int) -> History:
    made = SiteCall(_line(number), "all_reduce", "DDP", True)
    return History(count, {made: count}, (made,), None)


def test_a_rank_that_has_left_out_ddps_sums_is_named_once_it_has_ended() -> None:
    """While it runs it may only be late: then its count is no cause."""
    histories, model = [_of_ddp(5, 21), _of_ddp(5, 20)], Model(42, {})
    last = {rank: _call(its.total) for rank, its in enumerate(histories)}
    says = "rank 0 has summed gradients in 21 backwards, rank 1 in only 20, of as many batches"
    for ending, said in ((FINISHED, [says]), (COMPUTES, [])):
        ranks = [waits_in("backward")._replace(calls={Group("0", (0, 1)): histories[0]}, models=[model]),
                 ending._replace(calls={Group("0", (0, 1)): histories[1]}, models=[model])]
        told = [*out_of_step(Hang(ranks, {Group("0", (0, 1)): last}))]
        assert [one.partition(", at")[0] for one in told] == said


@pytest.mark.parametrize("value, text", [
    (2.5, "2.5"), (999.6, "1,000"), (31_049, "31,000"), (999_400, "999,000"), (999_600, "1 million"),
    (8.03e9, "8.03 billion"), (2e12, "2 trillion"), (15.64e12, "15.6 trillion")])
def test_numbers_in_sentences_have_commas_and_words_and_no_exponents(value: float, text: str) -> None:
    assert rounded(value) == text
    assert counted(1024, "rank") == "1,024 ranks" and counted(1, "batch") == "1 batch"
