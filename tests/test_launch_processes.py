"""Launching seen from outside: parents that die, torchrun, and a real notebook kernel."""
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from book.launch import HangError, RankError, launch
from tests.busy import busy

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 120.0
APART = "unshare --net" + " --map-root-user" * (os.geteuid() != 0)  # a network with nothing but a loopback that is down


def children(parent):
    """Ids of the processes that `parent` started, and of those that these started."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(pid): int(ppid) for pid, ppid in map(str.split, listed.splitlines())}
    found = [parent]
    for member in found:
        found += [pid for pid, ppid in parents.items() if ppid == member]
    return found[1:]


def runs(pid):
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until_gone(pids):
    end_s = time.monotonic() + LIMIT_S
    while any(map(runs, pids)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert [pid for pid in pids if runs(pid)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_and_no_folder_outlives_a_killed_launcher(tmp_path):
    program, environment = [sys.executable, str(PROGRAMS / "wait_forever.py")], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env=environment) as parent:
        lines = [parent.stdout.readline().strip() for _ in range(5)]
        pids = children(parent.pid)
        parent.kill()
        parent.wait(LIMIT_S)
    # "started" once only: the ranks did not run the script again.
    assert lines[0] == "started" and sorted(lines[2:]) == ["0 running", "1 running", "2 running"]
    assert len(pids) >= 5  # the ranks, what one of them has started, and the process they are forked from
    wait_until_gone(pids)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["child", "session", "daemon"])
def test_processes_started_by_a_rank_end_with_it(how):
    def start_one():
        if how != "daemon":
            return subprocess.Popen(["sleep", "600"], start_new_session=how == "session").pid
        daemon = "setsid sleep 600 >/dev/null 2>&1 & echo $!"
        said = subprocess.run(["sh", "-c", daemon], capture_output=True, text=True)
        return int(said.stdout)  # its parent, the shell, has ended

    def start_one_and_die():
        print(start_one(), file=sys.stderr, flush=True)
        os._exit(3)

    def start_one_and_hang():
        print(start_one())
        time.sleep(600)

    started = []
    wait_until_gone(list(launch(start_one, 2)))
    with pytest.raises(RankError) as died:
        launch(start_one_and_die, 2)
    wait_until_gone([int(text) for text in died.value.stderr])
    with pytest.raises(HangError):
        launch(start_one_and_hang, 2, timeout_s=1, on_line=lambda rank, line: started.append(int(line)))
    assert len(started) == 2
    wait_until_gone(started)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_launches_at_once_leave_each_others_ranks_alone():
    """The first to end looks for what its ranks have left, and finds the other's ranks beside it."""
    def run(seconds):
        return launch(lambda: time.sleep(seconds) or os.getpid(), 2)

    with ThreadPoolExecutor(2) as pool:
        short, long = pool.map(run, [0.0, 1.5])
    assert len({*short, *long}) == 4
    wait_until_gone([*short, *long])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_ranks_and_the_next_launch_works():
    running = []

    def interrupt(rank, line):
        running.append(int(line))
        if len(running) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    def wait():
        print(os.getpid())
        time.sleep(600)

    with pytest.raises(KeyboardInterrupt) as stopped:
        launch(wait, 2, on_line=interrupt)
    shown = stopped.value._render_traceback_()  # as a notebook shows it
    assert shown == ["KeyboardInterrupt: you have stopped this run; none of its 2 ranks is left"]
    wait_until_gone(running)
    assert list(launch(lambda: 1, 2)) == [1, 1]


def test_a_forked_process_and_its_parent_can_both_launch():
    ran = program("launch_in_forked_child")
    assert ran.returncode == 0, ran.stderr
    printed = [line for line in ran.stdout.splitlines() if "[" in line]
    assert printed == ["parent [2, 2]", "child [4, 4]", "parent [6, 6]"]


SGD_AT_ONCE = """
import sys
from book.launch import launch

def has_to_import():
    missing = "torch._dynamo" not in sys.modules
    import torch
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    return missing

print([launch(has_to_import, 2)[0] for _ in range(10)])
"""
WHETHER_IT_IMPORTED = """
from pathlib import Path
from book.launch import launch

def write(file):
    def missed():
        import sys
        return sys.modules["book.launch.preload"]._missed[0]
    Path(file).write_text(str(sum(launch(missed, 1)[0] for _ in range(10))))
"""


HUNG_AND_IMPORTED = """
import sys
from book.launch import HangError, launch

def hangs():
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint._fsspec_filesystem
    dist.init_process_group()
    dist.recv(torch.ones(1), 1 - dist.get_rank())

def missed():
    return sys.modules["book.launch.preload"]._missed[0]

try:
    launch(hangs, 2, hang_s=0.5)
except HangError:
    print(launch(missed, 1)[0])
"""


def test_a_rank_that_hangs_tells_too_that_it_had_to_import_something():
    done = subprocess.run([sys.executable, "-c", HUNG_AND_IMPORTED], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.splitlines()[-1] == "1", done.stderr


def test_what_a_rank_imports_for_itself_later_ranks_find_loaded():
    """Launches follow one another without a pause, and the launching process has none of it."""
    done = subprocess.run([sys.executable, "-c", SGD_AT_ONCE], capture_output=True, text=True, timeout=LIMIT_S)
    missing = done.stdout.splitlines()[-1]
    assert missing.startswith("[True, ") and missing.endswith("False]"), done.stderr


def test_ranks_that_import_nothing_have_the_server_import_nothing(tmp_path):
    """Not even what came with something else: torch brings its profiler along."""
    (tmp_path / "whether_it_imported.py").write_text(WHETHER_IT_IMPORTED)
    start = (f"import sys; sys.path.append({str(tmp_path)!r}); from book.launch import forked; "
             "import whether_it_imported as it; "
             f"forked.start(it.write, {str(tmp_path / 'found')!r}, whole=False).join()")
    subprocess.run([sys.executable, "-c", start], check=True, timeout=LIMIT_S)
    assert (tmp_path / "found").read_text() == "0"


def test_a_folder_whose_path_is_too_long_for_a_socket_is_named(tmp_path):
    folder = tmp_path / ("x" * 110)
    folder.mkdir()
    ran = program("sum_ranks", TMPDIR=str(folder))
    last = ran.stderr.splitlines()[-1]
    assert ran.returncode == 1 and str(folder) in last and "set TMPDIR to a folder with a shorter path" in last


@pytest.mark.skipif(subprocess.run(["sh", "-c", f"{APART} ip link"], capture_output=True).returncode != 0,
                    reason="this user can't make a network of their own, or there is no `ip`")
@pytest.mark.parametrize("changed", ["true", pytest.param("ip link set lo up && ip addr del 127.0.0.1/8 dev lo",
                                                          marks=pytest.mark.slow)])
def test_a_machine_without_loopback_is_told_what_to_switch_on(changed):
    ran = program("sum_ranks", within=[*APART.split(), "sh", "-c", changed + ' && exec "$@"', "sh"])
    last = ran.stderr.splitlines()[-1]
    assert ran.returncode == 1 and "can't reach that address" in last and "`ip link set lo up`" in last, ran.stderr


def program(name, within=(), **environment):
    """A program of tests/programs, run to its end, by itself or `within` another command."""
    command = [*within, sys.executable, str(PROGRAMS / f"{name}.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **environment})


@pytest.mark.slow
def test_the_same_function_runs_under_torchrun(capfd):
    program = str(PROGRAMS / "sum_ranks.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]
    runpy.run_path(program, run_name="__main__")
    launched = capfd.readouterr().out.splitlines()
    under_torchrun = subprocess.run(torchrun, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    assert under_torchrun.splitlines() == launched[1:]
    assert re.fullmatch(r"sum \[3.0, 3.0\] on (cpu|cuda)", launched[1])


SETUP = """\
import torch
import torch.distributed as dist
from book.launch import launch"""
HELLO = """\
def hello(word):
    dist.init_process_group()
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    print(word, total.item())

_ = launch(hello, 2, "sum")"""
FAIL = """\
def fail():
    rank = int(__import__("os").environ["RANK"])
    return 1 / (rank - 1)

launch(fail, 2)"""
HANG = """\
def hang():
    dist.init_process_group()
    peer = 1 - dist.get_rank()
    dist.recv(torch.empty(1), peer)

launch(hang, 2, hang_s=1)"""

REMOTE = """\
import os
import torch.distributed.rpc as rpc

def square(x):
    return x * x

def ask():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.rpc_sync(f"worker{1 - rank}", square, args=(rank + 3,))
    rpc.shutdown()
    return answer

print(list(launch(ask, 2)))"""

AGAIN = "for size in (1, 1, 2): launch(int, size)"


def test_cells_of_a_real_kernel(tmp_path):
    # Here, as the ranks of other tests import this module, and these take more than a second.
    import nbformat
    from nbclient import NotebookClient

    from tests.kernels import FOR_NBCLIENT

    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, HELLO, FAIL, HANG, REMOTE, AGAIN, AGAIN)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    NotebookClient(notebook, timeout=LIMIT_S, allow_errors=True, resources={"metadata": {"path": tmp_path}},
                   kernel_manager_class=FOR_NBCLIENT).execute()
    setup, hello, fail, hang, remote, *again = (cell.outputs for cell in notebook.cells)
    assert setup == []
    assert {output.name for output in hello} == {"stdout"}
    assert "".join(output.text for output in hello).splitlines()[1:] == ["[rank 0] sum 1", "[rank 1] sum 1"]
    assert (fail[-1].ename, fail[-1].evalue) == (
        "RankError", "rank 1 failed in cell line 3: return 1 / (rank - 1)\nZeroDivisionError: division by zero")
    assert fail[-1].traceback == ["RankError: " + fail[-1].evalue]
    assert (hang[-1].ename, hang[-1].evalue) == (
        "HangError", "the ranks wait for one another: nothing has moved for 1 s\n"
        "cause: ranks 0, 1 all receive first, and nobody sends: let one of them send first\n"
        "  rank 0 waits in recv from rank 1 at cell line 4: dist.recv(torch.empty(1), peer)\n"
        "  rank 1 waits in recv from rank 0 at cell line 4: dist.recv(torch.empty(1), peer)")
    assert "".join(output.text for output in remote).splitlines()[1:] == ["[9, 16]"]  # RPC finds a cell's function
    # Twice in one cell is once too often, but another cell says it again.
    shown = ["".join(output.text for output in outputs).splitlines() for outputs in again]
    assert [[line.split(" on ")[0] for line in lines] for lines in shown] == [["1 rank", "2 ranks"]] * 2


def trained_in(group):
    """A model in DDP whose group was destroyed right after a collective."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    model(torch.ones(2, 4)).sum().backward()
    losses = [None, None]
    dist.all_gather_object(losses, [torch.zeros(3)], group=group)
    total = torch.zeros(100)
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    return model


def train_and_destroy(rounds):
    """Free a model in DDP after its group, again and again; returns the number of rounds."""
    dist.init_process_group()
    for _ in range(rounds):
        group = dist.new_group([0, 1])
        model = trained_in(group)
        del group, model
    return rounds


def test_a_model_freed_after_its_group_was_destroyed_hangs_no_rank():
    """Without `book.launch.kept` a rank of such a run hangs, in torch 2.13, in most runs of 300 rounds."""
    with busy(2):
        assert list(launch(train_and_destroy, 2, 300)) == [300, 300]
