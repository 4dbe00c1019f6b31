"""Programs that are wrong, each for one reason, and what `book.launch` says of each.

    python examples/faults.py            lists them
    python examples/faults.py NAME       runs one, and prints the message
    python examples/faults.py --page     runs all, and writes the page "When it hangs" of the book
    python examples/faults.py --page NAME    runs one for it, and keeps what the page says of the others
"""
from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from book.launch import LaunchError, launch

sys.path.insert(0, str(Path(__file__).parent))  # ranks import the programs by these names
import faults_at_start as fail
import faults_in_silence as silent
import faults_that_hang as hang

PAGE = Path(__file__).parents[1] / "chapters" / "95_when_it_hangs.md"
SPACE = "\n\n"  # between a heading and the advice below it
NUM_RANKS, HANG_S, TIMEOUT_S = 3, 0.5, 20.0
Program = Callable[[], object]
HELPERS = {*hang.HELPERS, *silent.HELPERS, *fail.HELPERS}  # shown above the programs that use them


def programs_of(part: Any) -> list[Program]:
    """The programs of one of the modules, in the order of the page."""
    return [program for programs in part.GROUPS.values() for program in programs]


PROGRAMS = [program for part in (hang, fail, silent) for program in programs_of(part)]


def message(program: Program) -> str:
    """What `launch` says of a program; line numbers are those of its listing."""
    shown = {number: place for place, (number, _) in enumerate(numbered(program), 1)}
    timeout_s = hang.SHORT_TIMEOUT_S.get(program, TIMEOUT_S)
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        try:
            run = launch(program, NUM_RANKS, hang_s=HANG_S, timeout_s=timeout_s, env={"RUN_FOLDER": folder})
        except LaunchError as error:
            said = str(error)
        else:
            said = "\n".join(f"warning: {finding}" for finding in run.findings)
    if not said:
        raise AssertionError(f"nothing is said of {program.__name__}")
    return re.sub(r"\bfaults_\w+\.py line (\d+)", lambda place: f"line {shown[int(place[1])]}",
                  said.replace(folder, "runs"))


def numbered(program: Program) -> list[tuple[int, str]]:
    """A program's lines, and those of the helpers that it uses, without docstrings: (number in this file, line)."""
    source = inspect.getsource(program)
    parts = [helper for helper in HELPERS if re.search(rf"\b{helper.__name__}\b", source)]
    rows = [row for part in parts for row in [*_lines(part), (0, ""), (0, "")]]
    return rows + _lines(program)


def _lines(part: Callable[..., object]) -> list[tuple[int, str]]:
    text, first = inspect.getsourcelines(inspect.unwrap(part))
    node = ast.parse("".join(text)).body[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    said = {number for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef | ast.ClassDef)
            and ast.get_docstring(inner) for number in range(inner.body[0].lineno, (inner.body[0].end_lineno or 0) + 1)}
    kept = [(first + number - 1, line.rstrip()) for number, line in enumerate(text, 1) if number not in said]
    return [row for place, row in enumerate(kept) if row[1] or place > 1]


def listing(program: Program) -> str:
    """A program's code without docstrings."""
    return "\n".join(line for _, line in numbered(program)).rstrip()


HEAD = """# When it hangs, fails, or is wrong

Each program on this page is wrong, for one reason. Below each is what `launch` says of it. Find the message that looks
like yours. There are three kinds, and [a table](#messages-of-nccl-cuda-and-torchrun) of what other programs say:

- [It hangs](#it-hangs), or would: ranks wait for one another.
- [It fails](#it-fails): it can't start, or stops with an error of torch's.
- [It ends, and is wrong](#it-ends-and-is-wrong): nothing fails, and the result is not what you want. `launch` prints a
  `warning:` where the run has ended, and refuses a call that can't be right.

To look into a script of your own, start it with `lockstep run --ranks 4 train.py ARGS`. It starts the script,
unchanged, by torchrun, and prints the same sentences, each line marked `[lockstep]`: those of a hang once no rank has
moved for `--hang-s` seconds (10), those of a result that is wrong when the job has ended. A call that `launch` refuses,
such as a collective that differs between ranks, is told before it is made, and the script goes on. `lockstep run`
refuses one call only, as `launch` does: that with a tensor whose memory gloo would misread. When a rank fails, torchrun
ends the others at once. So a rank that has read a file too early is told so only if another rank had begun to write
that file by then.

The command needs torch and NumPy, and nothing else that this book uses: `pip install PATH`, with the path of this
repository, installs it in the environment of your job. Ranks that hang stay as they are, for you to look at.
`--end-hung` ends them once the hang is told.

On several hosts, start torchrun on each yourself, with `-m book.job` before the script:
`torchrun --nnodes 2 … -m book.job train.py ARGS`. `LOCKSTEP_HANG_S=60` in the environment sets the limit. The hosts
tell one another through torchrun's store how their ranks are, and the first host prints the sentences about all ranks.
Calls are compared inside each host only: where those of two hosts differ, you get the message of the hang that
follows. Each host sums up its own ranks at the end.

At the end, or when you interrupt the job, `lockstep run` says which rank was late, in which phase, and how long the
others waited for that rank ([why is my job slow?](13_slow_jobs.ipynb)), and how much communication is exposed in a
step. If you say what a step is, with `--tokens-per-step`, `--model` or `--params`, and `--gpu`, it says tokens per
second and MFU, and with `--layout` what `lockstep estimate` expects. With `--out DIR` it leaves a page,
`DIR/report.html`, with a picture of the last exchanges. The page of a hang draws who waits for whom, and its picture
opens at the last call that all ranks had made. If the job has already ended, `lockstep show` reads what it has left:
Flight Recorder dumps of a hang, profiler traces of a job that is slow
([how](12_when_a_rank_dies.ipynb#find-the-guilty-rank)), snapshots of a GPU's memory. With `--out page.html` it draws
dumps and traces. `lockstep doctor` says what this machine's ranks will stumble on: too little shared memory, a name
that leads to 127.0.0.1, a variable that is left from another job, a driver too old for torch's CUDA
{cite}`cudacompat`. Where `nvidia-ml-py` is installed, it asks NVML for memory errors, slow clocks and which GPUs
NVLink joins; that part is tested against answers as NVML's reference has them, and has not run on a card. `torchrun
--nnodes 2 … -m book.doctor` compares hosts: their versions, variables and clocks, and whether each reaches the others
at the addresses that gloo uses.

The programs are in `examples/`: `python examples/faults.py one_returns_early` runs one of them, on three ranks. There
`start` joins the group and returns the rank, and `start_rpc` makes the ranks workers of RPC as well. `LOCK` is a
`threading.Lock`, and `ALL_CALLS` a `threading.Barrier` for three threads.

## Messages of NCCL, CUDA and torchrun

Your own job may say what no program of this page says. The last three messages were seen here. The others need GPUs
and were not run: NCCL's are in its source {cite}`ncclinit`, the watchdog's in PyTorch's {cite}`pgncclsource`.
A rank that writes one is often not the one at fault: look for the earliest error in the logs of *all* ranks.

| message | what it means, and what is next |
|---|---|
| `Watchdog caught collective operation timeout` | On NCCL some rank has not come to this collective within the \
timeout, and the watchdog ends the process. **Next:** `lockstep show ~/.cache/torch/comm_lib_trace_rank_*` reads what \
the ranks have dumped, and names the one that the others wait for. |
| `Duplicate GPU detected : rank 1 and rank 0 both on CUDA device …` | Two ranks took the same GPU. **Next:** \
`torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before `init_process_group`, and no more `--nproc-per-node` \
than `nvidia-smi -L` lists. |
| `unhandled system error`, `unhandled cuda error` | A call to the system, the driver or a card failed. **Next:** \
start again with `NCCL_DEBUG=INFO` {cite}`ncclenv`; the line above the error names the call. |
| `remote process exited or there was a network error` | Another rank ended first, or the way to it broke. **Next:** \
the earliest error of all logs; if there is none, `dmesg` and the counters of the cards on both hosts. |
| `CUDA out of memory` on one rank, and the others wait | That rank has raised, and makes no more calls. **Next:** \
its traceback; a smaller micro-batch (`lockstep estimate` says which fits), or less on that rank, if it is the last \
stage of a pipeline or has the longest sequences. `lockstep show` says what held the memory, from a file that \
`torch.cuda.memory._dump_snapshot` writes where the error is caught, if `_record_memory_history()` was called before \
the model was built. |
| `Connection closed by peer`, `Connection reset by peer` | On gloo another rank ended in the middle of a call. \
**Next:** the earliest error of all logs. A rank without one was killed: `dmesg`. |
| `RendezvousConnectionError` | An agent of torchrun does not reach the store at the endpoint, or has lost it with \
its host. **Next:** `nc -vz HOST PORT` on the host that says so, then the log of the agent with `is_host=1`. |
| `EADDRINUSE`, `address already in use` | The port is taken, often by a job that was not ended. **Next:** `ss -ltnp` \
says by whom. Take another port in `--rdzv-endpoint`, or `--standalone` on one host. |

"""
READ_ON = {  # where the chapters and labs explain the faults of a group
    "Collectives": """\
Why order is all that matches calls: [chapter 1](01_ranks.ipynb#order-is-everything), and lab 1's exercises 5 and 6.""",
    "Groups": """\
What a group is for: [chapter 1](01_ranks.ipynb#groups), and a grid of them: [chapter
7](07_hybrid_3d.ipynb#ranks-on-a-grid) and lab 7's exercise 2.""",
    "Sends and receives": """\
How a message is matched: [chapter 1](01_ranks.ipynb#one-to-one-send-and-receive). Rings that never turn: lab 3's
exercise 6. Stages that wait for one another: [chapter 6](06_pipeline_parallel.ipynb#break-it).""",
    "DDP and sharded models": """\
What DDP calls, and when: [chapter 2](02_data_parallel.ipynb#break-it-validation-on-rank-0). The same of shards:
[chapter 4](04_sharded_data_parallel.ipynb#break-it-one-rank-runs-an-extra-forward).""",
    "RPC": """\
How calls over RPC are served: [RPC in PyTorch](88_rpc_in_pytorch.ipynb), and lab 6's exercise 6.""",
    "Locks, threads and queues": """\
Replicas in threads of one process: [chapter 2](02_data_parallel.ipynb#dp-one-process-a-thread-for-each-replica) and
lab 2's exercise 1.""",
    "The store, files and computations": """\
What the store is for: [chapter 1](01_ranks.ipynb#how-ranks-find-one-another).""",
    "Starts": """\
Who sets which variable: [starting ranks](81_starting_ranks.ipynb).""",
    "Errors of torch": """\
Checkpoints of a wrapped model: [checkpoints](89_checkpoints.ipynb). Time limits: [chapter
12](12_when_a_rank_dies.ipynb).""",
    "Processes of a rank": """\
Loaders in a training program: [training with DDP](82_training_with_ddp.ipynb).""",
    "Replicas of a model": """\
What keeps replicas equal: [chapter 2](02_data_parallel.ipynb#ddp-a-process-for-each-replica) and lab 2's exercises 3,
7 and 8.""",
    "Data and random numbers": """\
Which rank reads what: [training with DDP](82_training_with_ddp.ipynb). Dropout that must be equal on some ranks and
not on others: lab 5's exercise 6.""",
    "Tensors": """\
What a backend takes, and when a buffer is free again: [chapter 1](01_ranks.ipynb#one-to-one-send-and-receive) and lab
6's exercise 8. Gradients of what is exchanged: [chapter 5](05_tensor_parallel.ipynb#what-backward-needs) and lab 5's
exercise 2.""",
    "Threads": """\
Why the order of calls must be the same on all ranks: [chapter 1](01_ranks.ipynb#order-is-everything).""",
}
HANGS = """## It hangs

The message names the cause, then where each rank is. `launch` reports a hang when all ranks have waited for `hang_s`
seconds (here 0.5). A wait that may end by itself is reported at the time limit, `timeout_s`: a wait with a time limit
of its own, or one for another process that computes, sleeps or reads, as the workers of a `DataLoader` do.

"""
FAILS = """## It fails

The launcher knows what it has set, and asks the other ranks where they are when one fails.

"""
SILENT = """## It ends, and is wrong

Ranks take notes of a run, and `launch` compares them at its end: what the copies of a model hold, which samples ranks
have read, what was sent and what it was received as. If what a warning tells of is meant, switch that off: with
`audit=False` for a run, with `book.audit.ignore(model)` for one model in DDP or FSDP.

"""
TAIL = """
## A job that `launch` did not start

`torchrun` does not report a hang. Two calls do:

```python
dist.init_process_group(timeout=timedelta(seconds=60))  # to find a hang on gloo; on NCCL take longer, see below
for batch in loader:
    faulthandler.dump_traceback_later(120, exit=True)  # restarts the clock in each step
    ...
faulthandler.cancel_dump_traceback_later()  # or it ends the rank in its last evaluation
```

The `timeout` is that of the group of all ranks, and of no other: `new_group` takes its own, and the groups of a mesh of
several axes have the default, 30 minutes, or 10 if you name NCCL as the backend ([chapter
12](12_when_a_rank_dies.ipynb#what-failure-looks-like)). On gloo a call that has waited for so long raises an error. On
NCCL it raises nothing: the watchdog ends the process, and the job with it. So there take a time that is longer than
any rank works alone, while it compiles, saves or evaluates, and pass it to each `new_group` too.

If a step takes longer than two minutes, the rank prints the lines that all its threads are at, and ends. So take a
time that the slowest step stays below: the first, which compiles, or one that evaluates.

Replicas of a model may also drift apart, and nothing hangs. `launch` and `lockstep run` compare them at the end of a
run, and warn: those of a model in DDP, and in FSDP on a mesh of two axes (HSDP) the copies of each shard. Other
shards differ by design; of those, only optimizers with different settings or numbers of steps are told. In a program of
your own, ask on all ranks; what differs is told with the step and the line that parted them:

```python
from book import audit

audit.start()  # before init_process_group
...
for sentence in audit.compare(model):
    print(sentence)
```

## nanoGPT, with a fault at a time

A script that nobody wrote for this page: `train.py` of nanoGPT {cite}`nanogpt`, on two ranks without a GPU. `lockstep
run --ranks 2 train.py config/train_shakespeare_char.py --device=cpu --backend=gloo --compile=False` says why it stops,
as shipped:

```{code-block} text
:class: message
[lockstep] rank 0 failed in train.py line 89: torch.cuda.set_device(device)
[lockstep] this run has no GPU: use torch.device("cpu"), or what rank_device() of book.device returns, a GPU if there \
is one
```

Under torchrun that script takes `cuda:0`, whatever `--device` says. With `device = 'cpu'` there, and without
`device_ids=`, it trains. Here are four layers of width 128, with two micro-batches to a step. Then came one fault at a
time, in a few characters, on rank 1:

| rank 1 | what `lockstep run` said |
|---|---|
| has no fault | `no rank is late: for 13% of the time all others waited for one of them`, and `the model in DDP is \
the same on ranks 0, 1 after the last step` |
| sleeps in backward | `rank 1 is late: it came last to 30 of 32 exchanges, and all others waited 183 ms a step for \
it, 42% of the time`, and `what takes it longer than the others: backward, 176 ms a step` |
| sleeps in `get_batch` | `rank 1 is late: it came last to 29 of 32 exchanges`, and `what takes it longer than the \
others: other code, 119 ms a step`. Input is what a `DataLoader` does, and nanoGPT has none. |
| leaves the loop five steps early | `rank 0 has run the DDP model on 34 batches, rank 1 on only 32`, with the line |
| leaves out one all-reduce | `rank 0 has summed gradients in 21 backwards, rank 1 in only 20, of as many batches`, \
with the line. Nothing hangs before the end: each later sum is of different batches. |
| calls a barrier alone | `rank 1 has come once to …: if iter_num == 7 and ddp_rank == 1: \
torch.distributed.barrier()`, and `rank 0 never` |
| raises | `rank 1 failed in …: if iter_num == 7 and ddp_rank == 1: raise ValueError('a batch of rank 1 is broken')` \
|
| is killed | `rank 1 died without an error: something has killed it, as the system does when memory runs out` |

## What no launcher can see

Nothing hangs, nothing is refused, and the result is wrong. The first three are calls with the same tensors that mean
different things:

- `dist.broadcast(x, src=1, group=group)` in the group of ranks 1, 2 and 3: `src` is a rank of the world, so this is the
  group's first member. Whoever meant its member number 1, rank 2, writes `group_src=1`.
- A mean over ranks of means over batches counts each batch the same, large or small. Add up sums and counts, and
  divide once: `torch.stack([loss.sum(), count])`, one `all_reduce`, and the first divided by the second.
- A metric that one rank has computed for another split, epoch or key has the size that is expected.
- A tensor that is read before its `wait()` has the old values, the new ones, or some of each. PyTorch counts changes of
  a tensor and does not count reads. So `launch` tells if you *write* to a tensor between `isend` and `wait()`. It can't
  tell if you *read* one between `irecv`, or a collective with `async_op=True`, and `wait()`.

To check that ranks mean the same, send a name along with the tensor. Every rank says what it means, and whoever differs
is found at once:

```python
def same_on_all(meaning, group=None):
    # raises ValueError unless all ranks of the group say the same
    said = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, meaning, group=group)
    if any(each != meaning for each in said):
        raise ValueError(f"the ranks mean different things: {said}")

same_on_all(("val/loss", epoch, "sum over samples", "src is rank 2"))
```

It costs a message, so leave it in a test, or in the first step.

What `launch` itself hides: a set of strings has an order that depends on the hash seed of the process. The ranks of
`launch` are copies of one process and share the seed; those of `torchrun` do not. Layers made in the order of a set, or
files read in it, are then in another order on each rank. Loop over `sorted(names)`. To see what `torchrun` would do,
call `launch(train, 4, hash_seeds=True)`, which starts each rank anew and takes seconds. Of a model in DDP whose
parameters are then in different orders, the first one that differs is named.

## Sources

```{bibliography}
:filter: docname in docnames
:style: plain
```
"""


def title(program: Program) -> str:
    """The heading of a program's part of the page."""
    return inspect.cleandoc(program.__doc__ or "").partition(SPACE)[0].rstrip(".")


def sections() -> dict[str, str]:
    """What the page has of each program, below its heading, by the program's name."""
    programs = PAGE.read_text("utf-8").partition("\n## A job that")[0]
    parts = dict(re.findall(r"^#### (.*)\n((?:(?!^##).*\n?)*)", programs, flags=re.MULTILINE))
    return {program.__name__: parts[title(program)] for program in PROGRAMS if title(program) in parts}


def said_in(part: str) -> str:
    """The message that a part of the page shows."""
    return re.findall(r":class: message\n(.*?)\n```", part, re.DOTALL)[0]


def section(program: Program, said: str) -> str:
    """A program's part of the page."""
    return (f"#### {title(program)}\n\n{inspect.cleandoc(program.__doc__ or '').partition(SPACE)[2]}\n\n"
            f"```{{code-block}} python\n:linenos:\n{listing(program)}\n```\n\n"
            f"```{{code-block}} text\n:class: message\n{said}\n```\n")


def page(said: dict[Program, str]) -> str:
    """The whole page."""
    parts = [head + "\n".join(f"### {title}\n\n{READ_ON[title]}\n\n"
                              + "\n".join(section(program, said[program]) for program in programs)
                              for title, programs in part.GROUPS.items())
             for head, part in ((HANGS, hang), (FAILS, fail), (SILENT, silent))]
    return HEAD + "\n".join(parts) + TAIL


def main() -> None:
    """Run the command line."""
    names = {program.__name__: program for program in PROGRAMS}
    parser = argparse.ArgumentParser(description="Faulty programs, and what book.launch says of them.")
    parser.add_argument("name", nargs="?", choices=names, metavar="NAME", help="run this program")
    parser.add_argument("--page", action="store_true", help="run all programs, or this one, and write the book's page")
    options = parser.parse_args()
    if options.page:
        kept = sections() if options.name else {}
        PAGE.write_text(page({program: said_in(kept[name]) if name in kept and name != options.name
                              else message(program) for name, program in names.items()}), "utf-8")
    elif options.name:
        print(message(names[options.name]))
    else:
        print("\n".join(names))


if __name__ == "__main__":
    main()
