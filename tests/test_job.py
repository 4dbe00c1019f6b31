"""`lockstep run`: real jobs of torchrun, unchanged scripts, and what is said of those that hang or fail."""
from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from book.__main__ import main
from book.cost import MODELS
from book.job import command, ending, rates, told
from book.job.judge import Judge
from book.job.members import Member
from book.job.told import Told
from book.launch import family
from book.look import runs
from book.look.timelines import OPTIMIZER, Steps, Timeline
from book.look.told import timelines_told
from book.waiting.counts import JOIN
from book.waiting.doing import Doing, Kind
from book.waiting.hang import CollectiveCall, Group, Hang, Standing
from book.waiting.history import CallSite, History, Model
from tests.website import ROOT

pytestmark = pytest.mark.slow
LIMIT_S, LEAVE_S = 240.0, 60.0
EXAMPLES = ROOT / "examples"

SCRIPT = '''
import os, signal, sys, time
assert "torch" not in sys.modules  # nothing is imported before the script does
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, kind = dist.get_rank(), sys.argv[1]
dist.all_reduce(torch.ones(4))
if rank == 1:
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "crash":
        raise ValueError("bad batch")
    if kind == "exit":
        sys.exit(3)
if kind == "early" and rank == 1:
    sys.exit(0)
dist.all_reduce(torch.ones(4))
if kind == "half":
    if rank == 0:
        half = open("best.pt", "wb")
    dist.barrier()
    time.sleep(60 * (rank != 1))
    torch.load("best.pt")
if kind == "level":  # the dead rank has called as often as the others, which torchrun ends at once
    time.sleep(2)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
if kind == "message" and rank == 1:
    dist.recv(torch.ones(4), src=0)
if kind == "none":
    try:
        dist.all_gather([torch.ones(3)], torch.ones(3))
    except (RuntimeError, ValueError):  # one tensor for two ranks
        pass
print(f"rank {rank} of {__name__} has {sys.argv[1:]}", flush=True)
dist.destroy_process_group()
'''
HANGS = '''
import ctypes, os, signal, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, woken = dist.get_rank(), []
signal.signal(signal.SIGUSR1, lambda *_: woken.append(True))  # it also ends the sleep in C code
if rank == 1:
    print("rank 1 is process", os.getpid(), flush=True)
for kind in sys.argv[1:]:
    time.sleep(1)  # a rank reports twice a second: so that the last one is not of before the last hang
    woken.clear()
    if rank == 1:
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "interpreter":
            ctypes.PyDLL(None).sleep(1000)
        if kind == "loop":
            while not woken: pass
        if kind == "mismatch":
            dist.broadcast(torch.ones(4), src=0)
    dist.all_reduce(torch.ones(4))
'''
FAULT = '''
import sys
sys.path.insert(0, EXAMPLES)
import faults_that_hang
getattr(faults_that_hang, sys.argv[1])()
'''
WRONG = '''
import os, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
rank, kind = int(os.environ["RANK"]), sys.argv[1]  # it has others after it where the script can go on


class Stuck(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        if rank == 1 and i == 2:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return torch.full((4,), float(i + 10 * rank))


def dtype():
    if rank == 0:
        dist.send(torch.ones(4), dst=1)
    else:
        dist.recv(torch.ones(4, dtype=torch.int32), src=0)


def splits():
    sizes = {0: ([1, 2], [1, 1]), 1: ([1, 1], [1, 1])}[rank]
    dist.all_to_all_single(torch.ones(sum(sizes[1])), torch.ones(sum(sizes[0])), sizes[1], sizes[0])


def timeout():
    time.sleep(30 - 30 * rank)
    dist.barrier()


def train(batches):
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for number, batch in enumerate(batches):
        time.sleep(0.5 * (number == 2))  # a rank with a third batch comes second: gloo would end the other one at once
        model(batch).sum().backward()
    dist.all_reduce(torch.ones(()))


KINDS = {"dtype": dtype, "splits": splits, "timeout": timeout,
         "loader": lambda: train(DataLoader(Stuck(), 1, num_workers=1)),
         "uneven": lambda: train([torch.ones(4)] * (2 + rank))}
if __name__ == "__main__":
    if kind == "port":
        os.environ["MASTER_PORT"] = "1"
    options = {"rank": 0, "world_size": 2} if kind == "rank" else {}
    dist.init_process_group("gloo", timeout=timedelta(seconds=3 if kind == "timeout" else 300), **options)
    for kind in sys.argv[1:]:
        KINDS[kind]()
'''
RIGHT = '''
import os, sys
sys.path.insert(0, ROOT)
import torch
import torch.distributed as dist
from tests import test_audit


def start(same_seed=False):
    torch.manual_seed(0 if same_seed else 1000 + dist.get_rank())
    return dist.get_rank()


test_audit.start = start  # all in one job: a second start may meet the addresses of the first
dist.init_process_group("gloo")
for program, size in test_audit.RIGHT.items():
    if size == 2:
        program()
test_audit.past_the_wrapper()
'''
LOADER = '''
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((4,), float(i) + dist.is_initialized())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for method, num_workers in {"fork": 2, "spawn": 1}.items():  # one that is spawned imports torch
        for batch in DataLoader(Data(), 2, num_workers=num_workers, multiprocessing_context=method):
            model(batch).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(dist.get_rank())
            optimizer.step()
    dist.destroy_process_group()
'''

SLOW = '''
import sys, time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
rank = dist.get_rank()


def slow(where):
    if (kind, rank) == (where, 1):
        time.sleep(0.15)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        slow("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        slow("backward")
        return gradient


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.second(Slow.apply(self.first(x)))


class SGD(torch.optim.SGD):
    def step(self):
        slow("optimizer")
        return super().step()


def collate(samples):
    slow("input")
    return torch.stack(samples)


def sharded(net):
    fully_shard(net.first)
    fully_shard(net)
    return net


data = torch.randn(40, 8, generator=torch.Generator().manual_seed(rank))
replica = DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
for kind in sys.argv[1:]:
    net = sharded(Net()) if kind == "sharded" else replica
    optimizer = SGD(net.parameters(), 0.01)
    for batch in DataLoader(data, 4, collate_fn=collate):
        slow("other code")
        slow("sharded")
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print(end="trained\\n" * (rank == 0), flush=True)
time.sleep(1000)
'''

RATES = '''
import json, statistics, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = {"0, 1, 2": None, "0, 1": dist.new_group([0, 1])}
net = torch.nn.Linear(4, 1)
optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in net.parameters()]
starts_s, waited_s = [], {ranks: [] for ranks in groups}
for step in range(15):
    net(torch.ones(4)).sum().backward()
    for ranks, late_s in (("0, 1, 2", 0.2), ("0, 1", 0.06)):
        if rank == 1:
            time.sleep(late_s)
        begin_s = time.perf_counter()
        if str(rank) in ranks:
            dist.all_reduce(torch.ones(8), group=groups[ranks])
        waited_s[ranks].append(time.perf_counter() - begin_s)
    starts_s.append(time.perf_counter())
    for optimizer in optimizers:
        optimizer.step()
steps_s = [later - start for start, later in zip(starts_s, starts_s[1:])]
with open(f"{rank}.json", "w") as file:
    json.dump([*map(statistics.median, (steps_s, *waited_s.values()))], file)
'''


RPC_ALONE = '''
import os, threading
from torch.distributed import rpc
def waits():
    threading.Event().wait()
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    rpc.rpc_sync("worker1", waits)
rpc.shutdown()
'''


def job(folder: Path, text: str, *args: str, ranks: int = 3, options: tuple[str, ...] = ("--hang-s", "3", "--end-hung"),
        ) -> tuple[int, str, str]:
    """Run a script as a job in a folder of its own: the exit status, what the judge said, and all that was printed."""
    return run(written(folder, text, *args), folder, ranks, options)


def written(folder: Path, text: str, *args: str) -> list[str]:
    """A script in this folder and its arguments, as a command line has them."""
    script = folder / "train.py"
    script.write_text(text)
    return [str(script), *args]


def run(line: list[str], folder: Path, ranks: int, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    with started(line, folder, ranks, options) as process:
        printed, _ = process.communicate()
    return process.returncode, said_in(printed), printed


@contextmanager
def started(line: list[str], folder: Path, ranks: int, options: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    """A job while it runs, at most LIMIT_S. At the end no process of it is left, and no folder."""
    with tempfile.TemporaryDirectory(prefix="job") as temporary:  # a short name: sockets of workers are made there
        env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": temporary}
        with subprocess.Popen([sys.executable, "-m", "book", "run", "--ranks", str(ranks), *options, *line], text=True,
                              cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            limit = threading.Timer(LIMIT_S, process.terminate)
            limit.start()
            try:
                yield process
            finally:
                limit.cancel()
                process.terminate()
                try:
                    process.wait(LEAVE_S)
                except subprocess.TimeoutExpired:  # what is left is found below
                    process.kill()
        assert not list(Path(temporary).glob("lockstep*")), "a folder is left"
    assert not left(folder), "a process is left"


def said_in(printed: str) -> str:
    """What the judge has said."""
    return "\n".join(row.removeprefix("[lockstep] ") for row in printed.splitlines() if row.startswith("[lockstep] "))


def heard(process: subprocess.Popen[str], words: str) -> str:
    """What a job prints up to a line in which something matches, or to its end."""
    printed = ""
    assert process.stdout is not None
    for line in process.stdout:
        printed += line
        if re.search(words, line):
            break
    return printed


def left(folder: Path) -> list[str]:
    """The processes that still have something to do with a folder, once they have had time to end."""
    end_s = time.monotonic() + 20
    while True:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:
                continue
            if str(folder) in text and int(path.parent.name) != os.getpid():
                lines.append(text)
        if not lines or time.monotonic() > end_s:
            return lines
        time.sleep(0.2)


STOOD = {  # what is said of rank 1, and the signal that ends it
    "stop": (r"rank 1 is stopped by a signal \(SIGSTOP\)", signal.SIGCONT),
    "interpreter": (r"rank 1 waits in C code that holds the interpreter lock at train.py line 17: ctypes.PyDLL\(None\)",
                    signal.SIGUSR1),
    "loop": (r"rank 1 computes at train.py line 19: while not woken: pass", signal.SIGUSR1),
    "mismatch": (r"rank 1 calls broadcast\(float32 \[4\], src=0\) at train.py line 21: dist.broadcast", signal.SIGKILL),
}


def test_each_hang_is_told_once_until_the_ranks_go_on_or_one_is_killed(tmp_path: Path) -> None:
    with started(written(tmp_path, HANGS, *STOOD), tmp_path, 3, ("--hang-s", "2")) as process:  # a loop: after 12 s
        printed = heard(process, "rank 1 is process")
        rank_1 = int(printed.split()[-1])
        for words, ends in STOOD.values():
            printed += heard(process, words)
            if ends == signal.SIGKILL:  # that calls differ is told before they hang
                printed += heard(process, "nothing has moved") + heard(process, "ranks 0, 2 wait in")
            assert re.search(words, printed), printed
            os.kill(rank_1, ends)
        printed += process.communicate()[0]
    said = said_in(printed)
    assert process.returncode == 1
    assert said.count("nothing has moved for 2 s") == 3 and said.count("no rank has called another for 12 s") == 1, said
    assert said.count("ranks 0, 2 wait in all_reduce at train.py line 22: dist.all_reduce(torch.ones(4))") == len(STOOD)
    assert said.count("the ranks go on") == len(STOOD) - 1
    assert said.endswith("rank 1 died after that"), said


@pytest.mark.parametrize("name, ranks, words", [
    ("two_groups_in_two_orders", 3, r"each for the other: call the groups' collectives in the same order"),
    ("a_key_that_nobody_sets", 2, r"cause: .* waits? for the key '"),
])
def test_a_hang_has_the_cause_that_launch_tells(name: str, ranks: int, words: str, tmp_path: Path) -> None:
    status, said, _ = job(tmp_path, FAULT.replace("EXAMPLES", repr(str(EXAMPLES))), name, ranks=ranks)
    assert status == 1 and re.search(words, said), said
    assert re.search(r"at faults_that_hang.py line \d+", said)


def test_a_hang_of_workers_of_rpc_that_are_in_no_group_is_told(tmp_path: Path) -> None:
    status, said, _ = job(tmp_path, RPC_ALONE, ranks=2)
    assert status == 1 and "cause: rank 0 waits in rpc_sync to worker1, where the call waits in Event.wait() at" in said


@pytest.mark.parametrize("kind, words", [
    ("exit", "rank 1 failed in train.py line 15: sys.exit(3)\nSystemExit: the script called sys.exit(3)\n"),
    ("level", "rank 1 died without an error: something has killed it"),
    ("message", "rank 0 had ended\ncause: rank 1 waits in recv from rank 0, which has returned"),
    ("half", 'rank 0 writes this file at train.py line 21: half = open("best.pt", "wb"). Rank 1 has read it too early'),
    ("early", "rank 1 had ended\ncause: rank 0 waits in all_reduce(float32 [4], SUM); rank 1 returned without it"),
])
def test_the_first_rank_to_fail_is_named(kind: str, words: str, tmp_path: Path) -> None:
    status, said, _ = job(tmp_path, SCRIPT, kind, ranks=2)
    assert status == 1 and words in said, said
    assert "all_reduce(float32 [4], SUM) at train.py line" in said or kind == "half"


def test_of_what_is_right_and_one_fault_only_that_is_told(tmp_path: Path) -> None:
    status, said, printed = job(tmp_path, f"ROOT = {str(ROOT)!r}" + RIGHT, ranks=2, options=("--hang-s", "60"))
    first, *others = (row for row in said.splitlines() if not row.startswith("  "))
    assert status == 0 and first == "2 ranks ended", printed
    assert len(others) == 1 and re.search("warning: all parameters of .*goes past DDP", others[0]), printed


@pytest.mark.parametrize("kind, words", [
    ("splits", r"rank 0 sends 2 to rank 1, rank 1 expects 1"),
    ("port", r"nothing listens at port 1 of .*: the program has overwritten what torchrun had set, in train.py "
             r"line .*MASTER_PORT.*Leave this line out: torchrun sets them"),
    ("rank", r"ranks 0 and 1 of this job both call themselves rank 0 \(rank=0\): leave rank= and world_size= out, "
             r"torchrun sets them"),
    ("uneven", r"rank 1 calls all_reduce\(float32 \[5\], SUM\) of DDP in backward at .*\n"
               r"cause: rank 1 has run the DDP model on 3 batches, rank 0 on only 2, at train.py line .*: model\("),
    ("timeout", r"rank 1 waited 3 s in barrier, and then its time was up. It waited for rank 0, which sleeps at"),
    ("dtype loader", r"(?s)rank 0 sends float32 \[4\] to rank 1 at train.py line .*\n.*rank 1 receives int32 \[4\]"
                     r".*cause: rank 1 waits in DataLoader, and its worker process 0 waits in lock.acquire\(\)"),
])
def test_what_can_not_be_right_is_told_and_the_script_goes_on(kind: str, words: str, tmp_path: Path) -> None:
    status, said, printed = job(tmp_path, WRONG, *kind.split(), ranks=2)
    assert re.search(words, said), printed
    assert "died without an error" not in said, said


def test_where_ranks_fell_out_of_step_is_told_though_one_is_dead_and_another_has_gone_on(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    group, line = Group("0", (0, 1)), CallSite("train.py line 7: model(batch)")
    calls = {group: {rank: CollectiveCall(4, "all_reduce", f"float32 [{1 + rank}], SUM") for rank in (0, 1)}}
    stood = {rank: Standing(Doing(Kind.COMPUTES), calls={group: History(4, {}, (), None)},
                            models=(Model(2 + rank, {line: 2 + rank}),)) for rank in (0, 1)}
    first = Told(0, 2, range(2), gone.pid, 2.0, entered=True)
    differs = told.Mismatch("the ranks disagree", 1.0, calls, {0: stood[0]})
    later = Told(1, 2, range(2), gone.pid, 1.5, entered=True, standing=stood[1])
    assert told.stood({0: first, 1: later._replace(time_s=0.5)}, differs).keys() == {0}, "that was of an earlier call"
    assert told.stood({0: first, 1: later}, differs) == stood
    folder = told.attempt_folder(str(tmp_path), 0)
    folder.mkdir()
    told.write(folder, first._replace(mismatch=differs._replace(standings=stood)))
    told.write(folder, later._replace(standing=None))
    Judge(str(tmp_path), gone.pid, 3.0, ends_hung=False).watch()
    assert capsys.readouterr().err.splitlines()[:3] == [
        "[lockstep] the ranks disagree",
        "[lockstep] cause: rank 1 has run the DDP model on 3 batches, rank 0 on only 2, at train.py line 7: "
        f"model(batch): {JOIN}", "[lockstep] rank 0 died after that"]


def test_a_healthy_job_gets_its_arguments_and_a_summary(tmp_path: Path) -> None:
    kept = ("--out", str(tmp_path / "kept"))
    status, said, printed = job(tmp_path, SCRIPT, "none", "--out", "x", ranks=2, options=kept)
    assert status == 0 and "rank 1 of __main__ has ['none', '--out', 'x']" in printed
    assert said == ("2 ranks ended\n  who is late: too few exchanges to say\n"
                    "  group of ranks 0, 1: all_reduce 2; 32 B in a rank's tensors\n"
                    f"a page on this run: {tmp_path / 'kept' / 'report.html'}")
    assert set(told.read(tmp_path / "kept" / "attempt0")) == {0, 1}


@pytest.mark.parametrize("name, calls", [("train_ddp.py", "all_reduce"), ("train_fsdp.py", "reduce_scatter")])
def test_the_examples_run_unchanged_without_a_warning_and_leave_a_page(name: str, calls: str, tmp_path: Path) -> None:
    options = ("--hang-s", "60", "--out", str(tmp_path / "kept"))
    status, said, printed = run([str(EXAMPLES / name)], tmp_path, 2, options)
    assert status == 0 and said.startswith("2 ranks ended\n") and "warning" not in said, printed
    assert ("is the same on ranks 0, 1" in said) == (name == "train_ddp.py"), "shards differ by design"
    assert re.search(r"  \d+ steps after the first: \S+ ms in the median\n  waiting in communication: rank 0 ", said)
    assert re.search(r"  (no rank is late|rank \d is late|late is now)", said) and calls in said
    assert said.endswith(f"a page on this run: {tmp_path / 'kept' / 'report.html'}")
    assert "data-lockstep-calls" in (tmp_path / "kept" / "report.html").read_text("utf-8")


def test_the_late_rank_is_named_with_what_makes_it_late_and_an_interrupt_blames_nobody_else(tmp_path: Path) -> None:
    """In one job: every ten steps another phase of rank 1 takes long. Each ten are judged like a run of their own."""
    phases, kept = ("input", "forward", "backward", "optimizer", "other code", "sharded"), tmp_path / "kept"
    with started(written(tmp_path, SLOW, *phases), tmp_path, 2, ("--out", str(kept))) as process:
        printed = heard(process, "^trained$")
        time.sleep(1.0)  # a rank reports twice a second
        process.send_signal(signal.SIGTERM)
        rest = process.communicate()[0]
    said = said_in(rest)
    assert process.returncode not in (0, None) and said.startswith("59 steps after the first"), printed + rest
    assert not said_in(printed) and "cause" not in rest
    timelines = runs.read_run(kept / runs.FILE).timelines
    for number, phase in enumerate(phases):
        lines = [*timelines_told([steps_of(one, 10 * number, 10) for one in timelines])]
        require_late(lines, "other code" if phase == "sharded" else phase,
                     "the last 9 steps" if number else "9 steps after the first")


def test_tokens_mfu_and_exposed_communication_are_those_that_the_script_measures(tmp_path: Path) -> None:
    """Two optimizers step one after the other in each step; rank 1 comes late to both groups."""
    options = ("--tokens-per-step", "3072", "--model", "small-gpt", "--gpu", "h100", "--layout", "dp=3")
    status, said, printed = job(tmp_path, RATES, ranks=3, options=options)
    assert status == 0, printed
    step_s, world_s, pair_s = json.loads((tmp_path / "0.json").read_text())
    _, longest_s, _ = json.loads((tmp_path / "2.json").read_text())

    def number(words: str) -> float:
        found = re.search(words.replace("#", r"([\d,.e+-]+)"), said)
        assert found, (words, said)
        return float(found[1].replace(",", ""))

    assert number("14 steps after the first: # ms in the median") == pytest.approx(1e3 * step_s, rel=0.05)
    assert number("included, in the median: rank 0 # ms") == pytest.approx(1e3 * (world_s + pair_s), abs=15)
    assert number("waits longest: ranks 0, 1, 2: # ms on rank 2;") == pytest.approx(1e3 * longest_s, rel=0.05)
    assert number("; ranks 0, 1: # ms on rank 0") == pytest.approx(1e3 * pair_s, abs=15)
    assert number("tokens per second: # in the median step") == pytest.approx(3072 / step_s, rel=0.05)
    flops = MODELS["small-gpt"].step_flops(3072 / MODELS["small-gpt"].num_tokens)
    mfu = flops / step_s / (3 * 989e12)
    found = number("MFU: #% of the 2,970 TFLOP/s in 16 bits of 3 H100, by small-gpt's FLOPs")
    assert found == pytest.approx(100 * mfu, rel=0.05)
    planned_s = rates.work_of(command.asked_for(["--ranks", "3", *options, "x"])).planned_s
    assert number("Yours takes # times as long as the estimate") == pytest.approx(step_s / planned_s, rel=0.05)
    again = said.partition("your step as the measure: lockstep ")[2].partition("\n")[0]
    assert main(again.split()) == 0, "what is proposed can be asked"


@pytest.mark.parametrize("options, words", [
    (["--params", "8e9"], "needs --tokens-per-step"), (["--tokens-per-step", "-1"], "above 0, not -1"),
    (["--tokens-per-step", "nan"], "above 0, not nan"),
    (["--tokens-per-step", "64", "--params", "8e9", "--model", "gpt3"], "leave one out"),
    (["--tokens-per-step", "64", "--gpu", "h100"], "needs --params or --model too"),
    (["--tokens-per-step", "64", "--params", "8e9", "--gpu", "abacus"], "no GPU is called 'abacus'"),
    (["--tokens-per-step", "64", "--model", "gpt9"], "no model is called 'gpt9'"),
    (["--tokens-per-step", "64", "--model", "gone.json"], "gone.json"),
    (["--tokens-per-step", "64", "--layout", "dp=2"], "needs --model and --gpu too"),
    (["--tokens-per-step", "64", "--sequence", "8"], "--sequence is for --model"),
    (["--tokens-per-step", "100", "--model", "small-gpt", "--gpu", "h100", "--layout", "dp=2"], "no whole number"),
    (["--tokens-per-step", "64", "--model", "small-gpt", "--gpu", "h100", "--layout", "dp=4"], "for 4 GPUs, not for 2"),
])
def test_what_can_not_be_meant_of_a_step_is_refused_in_a_sentence_and_nothing_starts(
        options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.py").write_text("raise SystemExit(7)")
    assert command.run(command.asked_for([*options, str(tmp_path / "x.py")])) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and words in said


def test_of_parameters_alone_six_flops_a_token_count_and_too_fast_is_told() -> None:
    work = rates.work_of(command.asked_for([*"--ranks 4 --tokens-per-step 1e6 --params 8e9 --gpu a100 x".split()]))
    assert work == rates.from_environment(rates.to_environment(work)) and work is not None
    fair, fast = ([*rates.rates_told(work, Steps(9, step_s, True))] for step_s in (100.0, 10.0))
    assert fair == ["tokens per second: 10,000 in the median step, 2,500 a rank",
                    "MFU: 38.5% of the 1,250 TFLOP/s in 16 bits of 4 A100, by 6 FLOPs a token and parameter"]
    assert "MFU: 385%" in fast[1]
    assert fast[1].endswith("more than all is possible in 8 bits alone: check the numbers that you gave")
    assert "no two steps" in next(rates.rates_told(work, None))
    assert rates.work_of(command.asked_for(["x"])) is None and rates.from_environment({}) is None


def steps_of(timeline: Timeline, first: int, num: int) -> Timeline:
    """What a rank noted in these of its steps, each of which ends with the optimizer's."""
    ends_s = [-math.inf, *timeline.phase(OPTIMIZER)[:, 1]]
    calls, phases = (rows[(ends_s[first] < rows["start_s"]) & (rows["start_s"] < ends_s[first + num])]
                     for rows in (timeline.calls, timeline.phases))
    return replace(timeline, calls=calls, phases=phases)


def require_late(lines: list[str], phase: str, steps: str) -> None:
    """What is said of ten steps in which rank 1 sleeps 0.15 s each time in this phase."""
    median = re.match(steps + r": (\d+) ms in the median", lines[0])
    assert median and int(median[1]) >= 150, lines
    waiting = [int(share) for share in re.findall(r"rank \d (\d+)%", lines[1])]
    assert len(waiting) == 2 and waiting[0] > 60 > 40 > waiting[1], lines
    assert lines[2].startswith("rank 1 is late: it came last to "), lines
    assert lines[3].startswith(f"  what takes it longer than the others: {phase}, "), lines


def test_groups_of_the_same_ranks_are_told_apart() -> None:
    sums = {"0": (40, 160), "1": (3, 12)}
    totals = {(Group(name, (0, 1)), "all_reduce"): each for name, each in sums.items()}
    ranks = [Told(rank, 2, range(2), 0, 0.0, ended=True, totals=totals) for rank in (0, 1)]
    assert ending.summary(ranks, []).splitlines()[1:] == [
        "  group of ranks 0, 1 (group 1 of 2): all_reduce 40; 160 B in a rank's tensors",
        "  group of ranks 0, 1 (group 2 of 2): all_reduce 3; 12 B in a rank's tensors"]


def test_bytes_are_said_to_be_without_those_of_objects() -> None:
    group = Group("0", (0, 1))
    totals = {(group, "all_reduce"): (4, 16), (group, "all_gather_object"): (2, 0)}
    ranks = [Told(rank, 2, 2, 0, 0.0, ended=True, totals=totals) for rank in (0, 1)]
    assert ending.summary(ranks, []).splitlines()[1:] == [
        "  group of ranks 0, 1: all_reduce 4, all_gather_object 2; 16 B in a rank's tensors, its objects not counted"]


def test_an_error_before_any_group_is_told(tmp_path: Path) -> None:
    status, said, _ = job(tmp_path, "x = 1\nraise OSError('no data')\n", ranks=1)
    assert status == 1 and "failed in train.py line 2: raise OSError('no data')\nOSError: no data" in said


def test_workers_of_a_loader_are_no_ranks_and_replicas_are_compared(tmp_path: Path) -> None:
    status, said, printed = job(tmp_path, LOADER, ranks=2, options=())
    assert status == 0, printed
    assert "broadcast" in said and "differ between ranks 0, 1" in said


@pytest.mark.parametrize("kind, words", [
    ("stop", r"cause: rank 0 waits in all_reduce\(.*\); rank 1 is stopped by a signal \(SIGSTOP\) instead"),
    ("crash", r"rank 1 failed in train.py line 13: .*\n.*ValueError: bad batch")])
def test_under_torchrun_judges_of_two_hosts_know_of_each_others_ranks(kind: str, words: str, tmp_path: Path) -> None:
    """Two agents, as on two hosts."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr",
            "127.0.0.1", "--master-port", str(port)]
    env = os.environ | {"PYTHONPATH": str(ROOT), told.HANG_S: "3", told.END_HUNG: "1"}
    agents = [subprocess.Popen([*line, "--node-rank", str(node), "-m", "book.job", str(tmp_path / "train.py"), kind],
                               env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
              for node in range(2)]
    printed = [agent.communicate(timeout=LIMIT_S)[0] for agent in agents]  # until the judges have ended too
    assert all(agent.returncode == 1 for agent in agents), printed
    said = [[row for row in text.splitlines() if row.startswith("[lockstep]")] for text in printed]
    assert re.search(words, "\n".join(said[0] + said[1])), printed
    # Of a crash, host 0 may be gone before it has heard, and then host 1 tells it; or before it can say so.
    assert re.search(words, "\n".join(said[0])) or "is said on its host" in said[0][-1], printed
    assert kind == "crash" or not said[1], "it is told once, by host 0"
    assert not left(tmp_path)


def test_an_interrupt_ends_a_rank_without_a_group_and_nothing_is_said(tmp_path: Path) -> None:
    waits = "import time\nprint('begun', flush=True)\ntime.sleep(1000)\n"
    with started(written(tmp_path, waits), tmp_path, 1, ()) as process:
        heard(process, "^begun$")
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        rest = process.communicate()[0]
    assert process.returncode not in (0, None) and not said_in(rest) and "cause" not in rest


def test_a_missing_script_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(command.asked_for([str(tmp_path / "nothing.py")])) == 2
    assert "there is no script" in capsys.readouterr().err


def test_ranks_that_torchrun_ends_are_not_the_first() -> None:
    members = [Member(Told(rank, 2, range(2), os.getpid(), 0.0), 0.0, gone_s=gone_s)
               for rank, gone_s in ((0, 9.0), (1, 5.0))]
    assert ending.failure(members, Hang([], {}), differed=False).startswith(
        "rank 1 died without an error: something has killed it")
    assert not family.is_gone(os.getpid())
