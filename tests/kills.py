"""Kill ranks and agents of lab 12's training in each phase of a step, and check what is lost and what is left.

    python -m tests.kills [TIMES] [SEED]     at least TIMES kills (50); prints a line for each, and a table

Half of the kills hit ranks that `launch` started; the training is then launched again, on a drawn number of ranks.
The other half happen under torchrun, with three agents of one rank each. They hit a rank, or an agent together with
its rank (as when a host fails), or an agent alone, whose rank goes on. Exits with 1 if a checkpoint is lost, if a
resumed run has other losses than an undisturbed one or does not end, or if a process is left.
"""
from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import nbformat
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed.launcher import api
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from book.grading.lab import code_cells, marks, shown
from book.launch import RankError, launch

LAB = Path(__file__).parents[1] / "labs" / "12_when_a_rank_dies.ipynb"
NUM_STEPS, EVERY, EXACT = 15, 3, 1e-12
PHASES = ("between steps", "forward", "backward", "optimizer", "writing files", "ending a save", "loading")
NUM_AGENTS, LIMIT_S, GONE_S = 3, 240, 20
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Kill:
    """A planned kill: of what, in which phase, after how many steps, at which of two places, of which rank."""

    what: str  # "rank", "agent and rank" or "agent"
    phase: str
    after: int
    place: int
    victim: int  # modulo the number of ranks


@dataclass(frozen=True)
class Found:
    """A kill that happened, and what followed: a lost checkpoint, a wrong resume (how), processes left (how many)."""

    kill: Kill
    num_ranks: int
    rank: int
    step: int
    checkpoint: int  # the step of the last whole checkpoint when the kill happened
    lost: bool = False
    wrong: str = ""
    left: int = 0
    launcher: str = "launch"

    @property
    def victim(self) -> str:
        """What was killed; rank 0 apart from other ranks."""
        return "rank 0" if self.kill.what == "rank" and self.rank == 0 else self.kill.what

    @property
    def problem(self) -> str:
        """What went wrong, in words; empty if nothing did."""
        said = ["a checkpoint is lost"] * self.lost + [self.wrong] * bool(self.wrong)
        return "; ".join([*said, *[f"processes left: {self.left}"] * bool(self.left)])


@cache
def lab() -> dict[str, Any]:
    """What the setup and answer cells of the lab define."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(nbformat.read(LAB, as_version=4)):
        if marks(cell)["kind"] in ("setup", "parameters", "answer") and not shown(cell):
            exec(compile(cell.source, f"<ipython-input-{marks(cell)['id']}>", "exec"), namespace)
    return namespace


class Job:
    """The lab's training in one rank, with the kill that is planned for it; the plan and the record are files.

    `plan.json` lists the kills. A start that follows n kills carries out number n of them. `kill0.json`, ... record the
    kills that happened, `log*.jsonl` the losses of each start, and `pid*` the processes.
    """

    def __init__(self, train: Any, latest: Any, folder: str) -> None:
        self.train, self.latest, self.folder = train, latest, Path(folder)
        (self.folder / f"pid{os.getpid()}").touch()
        plan = [Kill(**one) for one in json.loads((self.folder / "plan.json").read_text())]
        self.number = len(list(self.folder.glob("kill*.json")))
        self.kill = plan[self.number] if self.number < len(plan) else None
        self.step, self.begun, self.passed = -1, 0, Counter[str]()

    def run(self) -> dict[int, float]:
        """The loss of each step, by step."""
        if self.kill:
            self._arm(self.kill.phase)
        names = self.train.__globals__
        names["mean_loss"] = self._logging(names["mean_loss"])
        return dict(self.train(str(self.folder / "saved"), NUM_STEPS, EVERY, self._before_step))

    def _before_step(self, step: int) -> None:
        self.step, self.begun = step, self.begun + 1
        self.passed.clear()
        self.at("between steps")

    def _logging(self, mean_loss: Callable[..., float]) -> Callable[..., float]:
        def logged(*arguments: Any) -> float:
            loss = mean_loss(*arguments)
            if dist.get_rank() == 0:
                with open(self.folder / f"log{os.getpid()}.jsonl", "a") as log:
                    log.write(json.dumps({"after_kills": self.number, "step": self.step, "loss": loss}) + "\n")
            return loss
        return logged

    def _arm(self, phase: str) -> None:
        """Have `at` called in this phase: twice, if the phase has two places for a kill."""
        def backward(module: Any, _: Any, output: Any) -> None:
            if isinstance(module, torch.nn.Linear) and output.requires_grad:
                output.register_hook(lambda gradient: self.at("backward"))

        if phase == "forward":
            register_module_forward_pre_hook(
                lambda module, _: self.at("forward") if isinstance(module, torch.nn.Linear) else None)
        elif phase == "backward":
            register_module_forward_hook(backward)
        elif phase == "optimizer":
            register_optimizer_step_pre_hook(lambda *_: self.at("optimizer"))
        elif phase == "writing files":
            self._around(dcp.FileSystemWriter, "write_data", phase)
        elif phase == "ending a save":
            self._around(dcp.FileSystemWriter, "finish", phase)
        elif phase == "loading":
            self._around(dcp.FileSystemReader, "read_data", phase)

    def _around(self, owner: Any, name: str, phase: str) -> None:
        method = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            self.at(phase)
            result = method(*arguments, **named)
            self.at(phase)
            return result
        setattr(owner, name, watched)

    def at(self, phase: str) -> None:
        """Training has reached a place of this phase; kill if the plan says so."""
        kill = self.kill
        if kill is None or phase != kill.phase or (phase != "loading" and self.begun <= kill.after):
            return
        self.passed[phase] += 1
        has_one = phase in ("between steps", "optimizer")
        victim = 0 if phase == "ending a save" else kill.victim % dist.get_world_size()
        if dist.get_rank() == victim and (has_one or self.passed[phase] == 1 + kill.place):
            self.kill = None
            self._die(kill.what)

    def _die(self, what: str) -> None:
        happened = {"num_ranks": dist.get_world_size(), "rank": dist.get_rank(), "step": self.step,
                    "checkpoint": self.latest(str(self.folder / "saved")) or 0}
        part = self.folder / f"part{self.number}"
        part.write_text(json.dumps(happened))
        part.rename(self.folder / f"kill{self.number}.json")
        if what != "rank":
            os.kill(os.getppid(), signal.SIGKILL)
        if what != "agent":
            os.kill(os.getpid(), signal.SIGKILL)


def job(train: Any, latest: Any, folder: str) -> dict[int, float]:
    """What a rank runs under `launch`."""
    return Job(train, latest, folder).run()


def launched(names: dict[str, Any], folder: str, draws: random.Random, num_kills: int) -> list[int]:
    """Launch the training, again after each kill, until it ends. Starts no processes besides ranks: returns no ids."""
    for _ in range(num_kills + 1):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                launch(job, draws.randint(2, 4), names["train"], names["latest"], folder)
                break
            except RankError as error:
                if "was killed by SIGKILL" not in str(error):
                    raise
    return []


def under_torchrun(folder: str) -> list[int]:
    """Train on `NUM_AGENTS` of torchrun's agents, and wait for them. Returns their process ids."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["tests.kills"])
    agents = [start.Process(target=agent, args=(store.port, folder, number)) for number in range(NUM_AGENTS)]
    for one in agents:
        one.start()
    end_s = time.monotonic() + LIMIT_S
    for one in agents:
        one.join(max(end_s - time.monotonic(), 0))
        one.kill()
    return [one.pid for one in agents if one.pid]


def agent(port: int, folder: str, number: int) -> None:
    """Do in this process what torchrun does on a host, but fork the rank, which saves it the import of torch."""
    with open(Path(folder, f"agent{number}.txt"), "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.update({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo",
                       "CUDA_VISIBLE_DEVICES": ""})
    lab()
    # By default an agent whose rank is done waits five minutes for agents that are dead.
    api.LocalElasticAgent = partial(api.LocalElasticAgent, exit_barrier_timeout=3)
    # Agents remove one from which they hear nothing for 8 s. With 2 s, on a loaded machine, they removed one that was
    # alive; it waited a minute for the number of its rank, and failed.
    api.elastic_launch(api.LaunchConfig(
        min_nodes=1, max_nodes=NUM_AGENTS, nproc_per_node=1, run_id="kills", max_restarts=9, monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{port}", local_addr="127.0.0.1", start_method="fork",
        rdzv_configs={"is_host": "0", "last_call_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 8}),
        agents_rank)(folder)


def agents_rank(folder: str) -> None:
    """What the rank of an agent runs."""
    agent_pid, names = os.getppid(), lab()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)  # a forked rank dies with its agent; torchrun's rank does not
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a rank that is left says where it is, and ends
    job(names["train"], names["latest"], folder)
    if os.getppid() != agent_pid:
        os._exit(0)  # a forked rank waits for its agent to take the result


def left(folder: Path, others: list[int]) -> list[int]:
    """The processes of the job that are alive; an orphan gets `GONE_S` seconds to notice that it is alone."""
    pids = [*others, *(int(path.name[3:]) for path in folder.glob("pid*"))]
    end_s = time.monotonic() + GONE_S
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end_s:
        time.sleep(0.1)
    return alive


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it is not a zombie: that has ended, and waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def problems(folder: Path, plan: list[Kill], want: dict[int, float]) -> list[Found]:
    """Each kill that happened, with what went wrong in the start that follows it."""
    texts = [path.read_text() for path in folder.glob("log*.jsonl")]
    logs = [[json.loads(line) for line in text.splitlines()] for text in texts if text]
    found = []
    for number, kill in enumerate(plan):
        file = folder / f"kill{number}.json"
        if not file.exists():
            break
        one = Found(kill, **json.loads(file.read_text()))
        resumed = [log for log in logs if log[0]["after_kills"] == number + 1]
        # When only an agent dies, its rank goes on: the losses of the same start must stay right.
        same = [log for log in logs if kill.what == "agent" and log[0]["after_kills"] == number]
        wrong = [line["step"] for log in same + resumed for line in log
                 if abs(line["loss"] - want[line["step"]]) > EXACT]
        later = [log[0]["step"] for log in logs if log[0]["after_kills"] > number]
        lost = one.checkpoint < one.step // EVERY * EVERY or any(step < one.checkpoint for step in later)
        starts = [log[0]["step"] for log in resumed if log[0]["step"] % EVERY]
        said = [f"wrong losses in steps {wrong}"] * bool(wrong) + [f"resumed in steps {starts}"] * bool(starts)
        found.append(replace(one, lost=lost, wrong=", ".join(said)))
    if found and not any(line["step"] == NUM_STEPS - 1 for log in logs for line in log):
        found[-1] = replace(found[-1], wrong=found[-1].wrong or "the training did not end")
    return found


def planned(draws: random.Random, phases: Iterator[str], elastic: bool) -> list[Kill]:
    """Up to three kills for one job. A kill while loading comes after a save; a kill of an agent alone is the last."""
    places = [next(phases) for _ in range(3)]
    if places[0] == "loading":
        places = [*places[1:], places[0]]
    plan: list[Kill] = []
    for number, phase in enumerate(places):
        what = draws.choice(["rank", "agent and rank", *["agent"] * (number > 0)]) if elastic else "rank"
        if number == NUM_AGENTS - 1 and {kill.what for kill in plan} == {"agent and rank"}:
            what = "rank"  # one host has to survive
        after = EVERY if "loading" in places[number + 1:] else draws.randrange(EVERY + 1)
        plan.append(Kill(what, phase, after, draws.randrange(2), draws.randrange(12)))
        if what == "agent":  # its rank goes on, so no other start follows
            break
    return plan


def kills(times: int, seed: int, elastic: bool) -> Iterator[Found]:
    """At least so many kills, under torchrun or `launch`, with what followed each."""
    names, draws, done = lab(), random.Random(seed), 0
    want = undisturbed(names)
    order = draws.sample(PHASES, len(PHASES))
    phases = (order[k % len(PHASES)] for k in range(10**9))
    while done < times:
        found = one_job(names, draws, planned(draws, phases, elastic), want, elastic)
        yield from found
        done += len(found)


def one_job(names: dict[str, Any], draws: random.Random, plan: list[Kill], want: dict[int, float],
            elastic: bool) -> list[Found]:
    """Run one training with its kills; if something goes wrong, its folder is kept, and stderr says where."""
    folder = Path(tempfile.mkdtemp())
    (folder / "saved").mkdir()
    (folder / "plan.json").write_text(json.dumps([asdict(kill) for kill in plan]))
    others = under_torchrun(str(folder)) if elastic else launched(names, str(folder), draws, len(plan))
    num_left = len(left(folder, others))
    found = [replace(one, launcher="torchrun" if elastic else "launch") for one in problems(folder, plan, want)]
    if not found:
        raise RuntimeError(f"none of these kills happened: {plan}; see {folder}")
    found[-1] = replace(found[-1], left=num_left)
    if any(one.problem for one in found):
        print(f"see {folder}", file=sys.stderr, flush=True)
    else:
        shutil.rmtree(folder)
    return found


def undisturbed(names: dict[str, Any]) -> dict[int, float]:
    """The losses of an undisturbed training."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return dict(launch(names["train"], 4, folder, NUM_STEPS, EVERY, lambda step: None)[0])


def table(found: list[Found]) -> str:
    """Kills by phase, launcher and victim; how many lost a checkpoint, resumed wrongly or left processes."""
    columns = [("launch", "rank"), ("launch", "rank 0"),
               *(("torchrun", what) for what in ("rank", "rank 0", "agent and rank", "agent"))]
    outcomes = {"kills": lambda one: True, "lost": lambda one: one.lost, "wrong": lambda one: bool(one.wrong),
                "left": lambda one: bool(one.left)}
    lines = [["", *(launcher for launcher, _ in columns), *[""] * len(outcomes)],
             ["killed while", *(victim for _, victim in columns), *outcomes]]
    for phase in (*PHASES, "all"):
        here = [one for one in found if phase in (one.kill.phase, "all")]
        counts = Counter((one.launcher, one.victim) for one in here)
        lines.append([phase, *(str(counts[column]) for column in columns),
                      *(str(sum(map(bad, here))) for bad in outcomes.values())])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def main() -> int:
    """Print each kill and the table; return 1 if anything went wrong."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    found = []
    for elastic in (False, True):
        for one in kills(times // 2, seed, elastic):
            found.append(one)
            print(f"{one.launcher:8} {one.victim:14} {one.kill.phase:13} {one.num_ranks} ranks, step {one.step}: "
                  f"checkpoint {one.checkpoint}. {one.problem}", flush=True)
    print(f"{len(found)} kills with seed {seed}\n{table(found)}")
    return int(any(one.problem for one in found))


if __name__ == "__main__":
    sys.exit(main())
