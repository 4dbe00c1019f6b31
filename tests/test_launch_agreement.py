"""Ranks compare their collectives before bytes move: differences are named, and right programs pass."""
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn  # the ranks need it too, and torch.distributed does not import it

from book.launch import HangError, RankError, agreement, launch
from book.launch.agreement import Agreement, CallMismatch
from book.launch.board import DEPTH, NUM_ALIKE, Board, NotedCall, Group
from book.tap import Op
from book.tap.log import OwnGroup

FLOATS, INTS = "float32 [4], SUM", "int32 [4], SUM"


def start():
    dist.init_process_group()
    return dist.get_rank()


def other_dtype():
    rank = start()
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32))


def other_size():
    rank = start()
    dist.all_reduce(torch.ones(4 if rank else 6))


def other_operation():
    rank = start()
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)


def other_root():
    rank = start()
    dist.broadcast(torch.ones(4), src=rank // 2)


def other_collective():
    rank = start()
    if rank == 2:
        dist.broadcast(torch.ones(4), 0)
    else:
        dist.all_reduce(torch.ones(4))


def other_order():
    rank = start()
    metrics = {"loss": torch.ones(4), "seen": torch.ones(1, dtype=torch.int64)}
    for name in sorted(metrics, reverse=rank == 3):
        dist.all_reduce(metrics[name])


def groups_of_members_alone():
    rank = start()
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1])
    dist.all_reduce(torch.ones(4), group=pair)


def other_call_in_a_group():
    rank = start()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.barrier(group=pairs[rank // 2])
    if rank == 3:
        dist.barrier(group=pairs[1])
    else:
        dist.all_reduce(torch.ones(4), group=pairs[rank // 2])


def other_sizes_in_a_list():
    rank = start()
    received = [torch.empty(2 if rank == 1 else 3) for _ in range(4)]
    dist.all_gather(received, torch.ones(2 if rank == 1 else 3))


def objects_beside_tensors():
    rank = start()
    if rank == 0:
        dist.all_gather_object([None] * 4, "x")
    else:
        dist.all_gather([torch.empty(1) for _ in range(4)], torch.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize("program, difference, calls", [
    (other_dtype, "dtypes", {f"ranks 0, 2, 3 call all_reduce({FLOATS})", f"rank 1 calls all_reduce({INTS})"}),
    (other_size, "sizes", {"rank 0 calls all_reduce(float32 [6], SUM)", f"ranks 1, 2, 3 call all_reduce({FLOATS})"}),
    (other_operation, "operations", {f"ranks 0, 1, 3 call all_reduce({FLOATS})",
                                     "rank 2 calls all_reduce(float32 [4], MAX)"}),
    (other_root, "roots", {"ranks 0, 1 call broadcast(float32 [4], src=0)",
                           "ranks 2, 3 call broadcast(float32 [4], src=1)"}),
    (other_collective, "collectives", {f"ranks 0, 1, 3 call all_reduce({FLOATS})",
                                       "rank 2 calls broadcast(float32 [4], src=0)"}),
    (other_order, "dtypes", {f"ranks 0, 1, 2 call all_reduce({FLOATS})", "rank 3 calls all_reduce(int64 [1], SUM)"}),
    (groups_of_members_alone, "new_group", {"ranks 0, 1 call new_group([0, 1])", "ranks 2, 3 call new_group([2, 3])"}),
    (other_call_in_a_group, "collectives", {f"rank 2 calls all_reduce({FLOATS})", "rank 3 calls barrier()"}),
    (other_sizes_in_a_list, "sizes", {"ranks 0, 2, 3 call all_gather(4 × float32 [3])",
                                      "rank 1 calls all_gather(4 × float32 [2])"}),
    (objects_beside_tensors, "collectives", {"rank 0 calls all_gather_object()",
                                             "ranks 1, 2, 3 call all_gather(4 × float32 [1])"}),
])
def test_what_ranks_disagree_on_is_named_with_every_call(program, difference, calls):
    with pytest.raises(RankError) as caught:
        launch(program, 4)
    head, *lines = str(caught.value).splitlines()
    assert head.startswith("the ranks disagree in a collective: ") and difference in head
    assert {line.strip().split(" at ")[0] for line in lines} == calls
    assert all(" at test_launch_agreement.py line " in line for line in lines)


def right_but_unusual():
    rank = start()
    dist.all_reduce(torch.ones([4, 1] if rank else [2, 2]))  # as many elements
    splits = [1, 2, 3, 4]
    received = torch.empty(4 * splits[rank])
    dist.all_to_all_single(received, torch.ones(10), [splits[rank]] * 4, splits)
    dist.all_gather_object([None] * 4, "x" * rank)
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]  # each rank makes as many: from 2.14 on torch names later groups by that
    dist.all_reduce(torch.ones(3 + rank // 2), group=dist.new_group(pair, use_local_synchronization=True))
    for root in range(4):
        dist.scatter(torch.empty(2), [torch.ones(2)] * 4 if rank == root else None, src=root)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dist.broadcast(torch.ones(rank % 2 + 1), group_src=1, group=pairs[rank % 2])
    work = [dist.all_reduce(torch.ones(number), async_op=True) for number in range(1, 3 * DEPTH)]
    for each in work:
        each.wait()
    for _ in range(3 * DEPTH):  # the root may be far ahead
        dist.broadcast(torch.ones(1), 0)
    parameter = torch.ones(2, requires_grad=True)
    torch.distributed.nn.functional.all_reduce(parameter * (rank + 1)).sum().backward()
    return parameter.grad.tolist()


def test_unusual_but_right_programs_pass():
    assert list(launch(right_but_unusual, 4)) == [[4.0 * (rank + 1)] * 2 for rank in range(4)]


def one_is_refused_first():
    rank = start()
    if rank == 1:
        with pytest.raises(RuntimeError):
            dist.all_gather([torch.ones(2)] * 3, torch.ones(1))
        dist.send(torch.ones(1), 0)
    if rank == 0:
        dist.recv(torch.ones(1), 1)
    total = torch.ones(4)
    dist.all_reduce(total)
    return total.tolist()


def all_are_refused_at_different_times(first):
    rank = start()
    time.sleep(0.3 * (rank != first))
    with pytest.raises(RuntimeError, match="allgather: invalid"):
        dist.all_gather([torch.ones(r + 1) for r in range(3)], torch.ones(rank + 1))
    total = torch.ones(4)
    dist.all_reduce(total)
    return total.tolist()


@pytest.mark.slow
def test_a_call_that_torch_refuses_counts_as_never_made():
    assert list(launch(one_is_refused_first, 2)) == [[2.0] * 4] * 2
    for first in range(3):
        assert list(launch(all_are_refused_at_different_times, 3, first)) == [[3.0] * 4] * 3


def test_torch_itself_refuses_bad_arguments():
    def bad():
        start()
        dist.all_reduce("no tensor")

    with pytest.raises(RankError, match="TypeError|AttributeError"):
        launch(bad, 2)


@pytest.mark.slow
def test_without_the_comparison_ranks_see_what_torch_does():
    with pytest.raises(HangError, match="waits in broadcast|waits in all_reduce"):
        launch(other_collective, 3, check_calls=False, hang_s=1)


def test_a_board_keeps_the_last_calls_of_every_rank_and_group_apart():
    board = Board(range(3))
    groups = Group("0", (0, 1, 2)), Group("1", (0, 2))
    noted = {(rank, group, number): NotedCall(number, (rank,) * NUM_ALIKE, group.name, f"[{number}]", "code.py", number)
             for rank in range(3) for group in groups for number in range(1, 3 * DEPTH)}
    for (rank, group, _), call in noted.items():
        board.note(rank, group, call)
    for (rank, group, number), call in noted.items():
        kept = number >= 2 * DEPTH
        assert board.read(rank, group, number) == (call if kept else None)
    assert board.read(0, groups[0], 3 * DEPTH) is None and board.read(0, Group("2", (0, 1)), 1) is None
    last = board.last_calls()
    assert {group: {rank: call.number for rank, call in calls.items()} for group, calls in last.items()} == {
        group: dict.fromkeys(range(3), 3 * DEPTH - 1) for group in groups}
    board.close()


def test_arguments_too_long_for_a_slot_are_cut_and_a_group_of_many_ranks_is_not():
    board, group = Board(range(1)), Group("world", tuple(range(0, 2000, 3)))
    noted = NotedCall(1, tuple(range(NUM_ALIKE)), "all_reduce", "é" * 1000, "code.py", 7)
    board.note(0, group, noted)
    call = board.read(0, group, 1)
    assert call is not None and 100 < call.arguments.count("é") < 300
    assert call._replace(arguments=noted.arguments) == noted and list(board.last_calls()) == [group]
    board.close()


def test_of_a_thousand_ranks_those_of_the_host_are_compared(monkeypatch):
    board, group = Board(range(8, 16)), tuple(range(1024))
    monkeypatch.setattr(agreement, "WAIT_S", 0.0)
    asked = []
    alike = board.alike
    monkeypatch.setattr(board, "alike", lambda peer, *call: asked.append(peer) or alike(peer, *call))

    def calls(rank, *functions):
        compared, own = Agreement(board), OwnGroup("0", group, "cpu:gloo", rank)
        for number, function in enumerate(functions, 1):
            compared.before(Op(function, function, own, number, ("code.py", rank)))

    calls(9, "all_reduce", "barrier")
    assert asked == 2 * [rank for rank in range(8, 16) if rank != 9]
    with pytest.raises(CallMismatch, match="rank 9 calls barrier.*\n.*rank 10 calls all_reduce"):
        calls(10, "all_reduce", "all_reduce")
    calls(16, "barrier")  # of another host: nothing is noted here
    assert {rank for called in board.last_calls().values() for rank in called} == {9, 10}
    board.mail.post(16, b"channel1", 1, b"note")
    assert board.mail.read(16, b"channel1", 1) is None
    board.close()
