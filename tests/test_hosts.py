"""Ranks on several hosts: relative times, torchrun's agents, Slurm, Kubernetes, and devices of which they are told."""
from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname
from torch.distributed.launcher.api import LaunchConfig

from benchmarks import across, saving
from book.collectives import ring_all_reduce
from book.device import message_backends, message_device
from book.execute import execute
from book.hosts import CARD, Agents, Hosts, NoHosts
from book.launch import launch, rank_device
from book.look.timelines import steps
from book.record import lanes
from tests.slurm import NODES, NoSlurm, cluster
from tests.test_chapters import cells
from tests.test_launch_processes import LIMIT_S, PROGRAMS, wait_until_gone
from tests.website import ROOT



@pytest.fixture(scope="module")
def compared():
    try:
        with Hosts(1, 10**9):
            pass
    except NoHosts as reason:
        pytest.skip(str(reason))
    return across.compare(2, 2, num_rounds=3)


@pytest.mark.slow
def test_relative_times_are_predicted_and_the_order_is_right(compared):
    assert all(abs(error) <= across.PROMISED for error in across.errors(compared).values()), compared
    by_time, by_prediction = (sorted(compared, key=lambda name: getattr(compared[name], which))
                              for which in ("measured_s", "predicted_s"))
    alike = {"tree", "halving–doubling"}  # predicted to take the same time
    assert [name for name in by_time if name not in alike] == [name for name in by_prediction if name not in alike]


@pytest.mark.slow
def test_with_a_link_for_each_pair_of_ranks_the_prediction_is_wrong(compared):
    ring, crossing = compared["ring"], compared["halving–doubling"]
    assert crossing.unshared_s < ring.unshared_s and crossing.measured_s > ring.measured_s


@pytest.mark.slow
def test_no_host_is_left(compared):
    assert "lockstep" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.mark.slow
def test_a_checkpoint_on_the_same_network_makes_steps_longer_and_blames_no_rank():
    names = "nothing is saved", "saved as fast as it goes"
    try:
        alone, shared = saving.measured(names).values()
    except NoHosts as reason:
        pytest.skip(str(reason))
    assert steps(shared.timelines).median_s > 1.2 * steps(alone.timelines).median_s
    for run in (alone, shared):
        assert any(line.strip().startswith("no rank is late: the exchanges") for line in run.said), run.said


@pytest.mark.slow
def test_both_directions_of_a_card_are_limited():
    try:
        with Hosts(2, 80_000_000) as hosts:
            shown = [subprocess.run(["ip", "netns", "exec", namespace, "tc", "class", "show", "dev", device],
                                    capture_output=True, text=True).stdout
                     for namespace, device in ((hosts._host(1), CARD), (hosts._switch, "p1"))]
    except NoHosts as reason:
        pytest.skip(str(reason))
    assert all("1:9" in classes and "rate 80Mbit" in classes for classes in shown), shown


@pytest.mark.slow
def test_agents_on_this_machine_form_one_group_without_hosts():
    with Agents(2) as agents:
        told = agents.torchrun(1, [str(ROOT / "examples" / "report_ranks.py")])
    ranks = sorted(line.split(", node")[0] for line in told.splitlines())
    assert ranks == [f"rank {rank} of 2, local rank 0" for rank in range(2)]
    assert str(agents).startswith("2 agents on this machine")


@pytest.mark.slow
def test_a_program_that_fails_is_reported_with_its_host(tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit('no such data')")
    with Agents(1) as agents, pytest.raises(NoHosts, match=r"(?s)host 0: .*no such data"):
        agents.torchrun(1, [str(tmp_path / "fails.py")])


TORCHRUN = "-m torch.distributed.run"
AGENTS_LINE = re.compile(r"rank (\d) of 4, local rank (\d) of 2, node (\d), sum 4, arguments \[\]")


@pytest.fixture(scope="module")
def chapter():
    """What the page defines to put a program into a file and run commands on it."""
    namespace = {"os": os, "time": time}
    for source in cells("81_starting_ranks", "code"):
        if source.startswith("JOB =") or "def run_program(" in source:
            exec(source, namespace)
    return namespace


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
def test_two_agents_form_one_group(chapter):
    agent = (f"{TORCHRUN} --nnodes=2 --nproc-per-node=2 --rdzv-id=test --rdzv-backend=c10d "
             f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    agents = chapter["run_program"](chapter["JOB"], agent, agent, timeout_s=LIMIT_S, CUDA_VISIBLE_DEVICES="")
    found = [[tuple(map(int, match)) for match in AGENTS_LINE.findall(output)] for output, _ in agents]
    assert sorted(found[0] + found[1]) == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)], agents
    assert [len({node for _, _, node in ranks}) for ranks in found] == [1, 1]  # an agent's ranks are on its own node


@pytest.mark.slow
@pytest.mark.parametrize("told", [(0, 1), (1,)], ids=["all agents are told", "one agent is told"])
def test_ranks_that_are_told_to_stop_end_with_the_save_and_no_agent_reports_success(tmp_path, told):
    """What chapter 12 writes, with a save that takes longer than an agent needs to end."""
    (source,) = (source for source in cells("12_when_a_rank_dies", "code") if source.startswith("PREEMPTED ="))
    program, saved = ast.literal_eval(ast.parse(source).body[0].value), tmp_path / "saved.pt"
    assert "            torch.save(" in program and "range(first, 40)" in program
    (tmp_path / "train.py").write_text(program.replace("torch.save(", "time.sleep(12), torch.save(", 1)
                                       .replace("range(first, 40)", "range(first, 4000)"))
    line = (f"{sys.executable} {TORCHRUN} --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=test "
            f"--rdzv-endpoint=127.0.0.1:{free_port()} --local-addr=127.0.0.1 train.py")
    agents = [subprocess.Popen(line.split(), cwd=tmp_path, env={**os.environ, "SAVED": str(saved)},
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(2)]
    try:
        assert all("begins at step 0" in agent.stdout.readline() for agent in agents)
        for number in told:
            agents[number].terminate()
        while all(agent.poll() is None for agent in agents):
            time.sleep(0.05)
        assert saved.exists(), "an agent has ended before the save"
        assert all(agent.wait(LIMIT_S) != 0 for agent in agents)
        assert Path(f"{saved}.stopped").exists()
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


@pytest.mark.slow
def test_nodes_are_numbered_by_hand_in_the_static_form(chapter):
    agent = (f"{TORCHRUN} --nnodes=2 --nproc-per-node=1 --node-rank={{}} --master-addr=127.0.0.1 "
             f"--master-port={free_port()}")
    agents = chapter["run_program"](chapter["JOB"], agent.format(1), agent.format(0), timeout_s=LIMIT_S,
                                    CUDA_VISIBLE_DEVICES="")
    line = r"rank (\d) of 2, local rank 0 of 1, node (\d), sum 2, arguments \[\]"
    assert [re.findall(line, output) for output, _ in agents] == [[("1", "1")], [("0", "0")]], agents


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_cell_leaves_no_process(chapter, tmp_path):
    def interrupt():
        end_s = time.monotonic() + LIMIT_S
        while len(os.listdir(tmp_path)) < 4 and time.monotonic() < end_s:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    program = (PROGRAMS / "wait_to_be_ended.py").read_text()
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        chapter["run_program"](program, f"{TORCHRUN} --standalone --nproc-per-node=2", "", timeout_s=2 * LIMIT_S,
                               PIDS=str(tmp_path))
    ranks = [int(name) for name in os.listdir(tmp_path)]
    assert len(ranks) == 4
    wait_until_gone(ranks)


SCRIPT, PROGRAM = ROOT / "examples" / "slurm" / "job.sbatch", ROOT / "examples" / "report_ranks.py"
SLURM_LIMIT_S = 240
SLURM_LINE = re.compile(r"rank (\d) of 4, local rank (\d), node ([\d.]+), sum 4")


@pytest.fixture(scope="module")
def slurm():
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # a socket's path has to be short
    try:
        with cluster(folder) as environment:
            yield environment
    except NoSlurm as reason:
        pytest.skip(str(reason))
    finally:
        shutil.rmtree(folder)


ON_ONE_MACHINE = {"PYTHON": sys.executable, "LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def submitted(slurm, folder, *program, **settings):
    """What a job printed, and how sbatch ended."""
    done = subprocess.run(["sbatch", "--wait", f"--output={folder}/job.out", str(SCRIPT), *map(str, program)],
                          env={**slurm, **ON_ONE_MACHINE, **settings}, cwd=folder, capture_output=True, text=True,
                          timeout=SLURM_LIMIT_S)
    return (folder / "job.out").read_text(), done.returncode


def spans_two_nodes(told):
    ranks = sorted(SLURM_LINE.findall(told))
    assert [(rank, local) for rank, local, _ in ranks] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")], told
    return ranks[0][2] == ranks[1][2] != ranks[2][2] == ranks[3][2]  # which is first is up to the agents


@pytest.mark.slow
def test_a_job_spans_two_nodes(slurm, tmp_path):
    told, status = submitted(slurm, tmp_path, PROGRAM)
    assert status == 0 and spans_two_nodes(told), told
    shown = subprocess.run(["scontrol", "--oneliner", "show", "jobs"], env=slurm, capture_output=True, text=True)
    assert "NodeList=127.0.0.[1-2]" in shown.stdout and "Requeue=1" in shown.stdout, "a short form, which scontrol read"


FAILS_AT_FIRST = """import os, pathlib, runpy, sys
print(f"told {sys.argv[1:]}", flush=True)
if os.environ["RANK"] == "3" and not pathlib.Path(f"{__file__}.failed").exists():
    pathlib.Path(f"{__file__}.failed").touch()
    sys.exit(5)
runpy.run_path(sys.argv[2], run_name="__main__")
"""


@pytest.mark.slow
def test_a_rank_that_fails_is_started_again_with_its_arguments(slurm, tmp_path):
    failing = tmp_path / "fails_at_first.py"
    failing.write_text(FAILS_AT_FIRST)
    told, status = submitted(slurm, tmp_path, failing, "two words", PROGRAM)
    assert status == 0 and spans_two_nodes(told), told
    assert told.count(f"told ['two words', '{PROGRAM}']") == 8, told


STANDS_IN = {  # for Slurm: what it would write, and what it would start on each of two nodes
    "scontrol": f'[ "$*" = "show hostnames short[1-2]" ] && printf "{NODES[0]}\\n{NODES[1]}\\n"',
    "srun": """while [ "${1#--}" != "$1" ]; do shift; done
        SLURM_NODEID=1 SLURMD_NODENAME=127.0.0.2 "$@" & other=$!
        SLURM_NODEID=0 SLURMD_NODENAME=127.0.0.1 "$@" && wait $other"""}


@pytest.mark.slow
def test_the_script_names_the_first_node_and_passes_arguments_where_slurm_has_stand_ins(tmp_path):
    for name, text in STANDS_IN.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    failing = tmp_path / "fails_at_first.py"
    failing.write_text(FAILS_AT_FIRST)
    slurm = {"SLURM_JOB_NODELIST": "short[1-2]", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "2",
             "SLURM_JOB_ID": str(os.getpid()), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(SCRIPT), str(failing), "two words", str(PROGRAM)],
                          env={**os.environ, **ON_ONE_MACHINE, **slurm}, capture_output=True, text=True,
                          timeout=SLURM_LIMIT_S)
    assert done.returncode == 0 and spans_two_nodes(done.stdout), done.stderr
    assert done.stdout.count(f"told ['two words', '{PROGRAM}']") == 8, done.stdout


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job(slurm, tmp_path):
    failing = tmp_path / "fails.py"
    failing.write_text("import os, sys, time\nif os.environ['RANK'] == '3':\n    sys.exit(5)\ntime.sleep(200)\n")
    told, status = submitted(slurm, tmp_path, failing, MAX_RESTARTS="0")
    assert status != 0 and "exitcode  : 5" in told, told


@pytest.mark.slow
def test_the_chapter_shows_the_script_as_it_is():
    """But for the comments of its options."""
    shown = "\n".join(cells("11_beyond_one_machine", "markdown"))
    lines = [line for line in SCRIPT.read_text().splitlines() if line]
    bare = {re.sub(r"\s+# .*", "", line) for line in shown.splitlines()}
    assert [line for line in lines if line not in bare] == []


FOLDER = ROOT / "examples" / "kubernetes"


@pytest.fixture
def objects():
    return {one["kind"]: one for path in FOLDER.glob("*.yaml") for one in yaml.safe_load_all(path.read_text())}


def agents_options(container, index):
    """What a container of `bash -c` passes to torchrun in the pod of this number."""
    (line,) = container["args"]
    assert container["command"] == ["bash", "-c"] and line.startswith("exec torchrun ")
    done = subprocess.run(["bash", "-c", line.replace("exec torchrun", "printf '%s\\n'")], check=True, text=True,
                          capture_output=True, env={**os.environ, "JOB_COMPLETION_INDEX": str(index)})
    return dict(word.removeprefix("--").split("=", 1) for word in done.stdout.split() if word.startswith("--"))


def test_the_agents_of_a_job_meet_at_its_first_pod(objects):
    job, service = objects["Job"], objects["Service"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    options = agents_options(pod["containers"][0], 0)
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == int(options["nnodes"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert options["rdzv-endpoint"] == f"{job['metadata']['name']}-0.{pod['subdomain']}:29500"
    assert int(options["nproc-per-node"]) == pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]


def test_the_first_pod_of_a_job_hosts_the_store_though_no_name_is_known_yet(objects):
    """From the name alone no pod would: it is unknown here, as it is before DNS has an address for it."""
    container, hosts = objects["Job"]["spec"]["template"]["spec"]["containers"][0], []
    for index in (0, 1):
        options = agents_options(container, index)
        key, said = options["rdzv-conf"].split("=")
        asked = RendezvousParameters("c10d", options["rdzv-endpoint"], options["rdzv-id"], 2, 2, **{key: said})
        hosts.append(asked.get_as_bool("is_host"))
    assert hosts == [True, False]
    assert not _matches_machine_hostname(options["rdzv-endpoint"].partition(":")[0])


def test_a_job_outlives_the_loss_of_its_first_pod_and_pods_that_are_drained(objects, monkeypatch):
    """With the first pod all pods fail, and a pod has to be there until torchrun has ended its ranks."""
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    spec, shutdown_s = objects["Job"]["spec"], LaunchConfig(2, 2, 8).shutdown_timeout
    pod = spec["template"]["spec"]
    assert spec["backoffLimit"] >= 2 * spec["completions"] and spec["backoffLimit"] % spec["completions"] == 0
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert pod["restartPolicy"] == "Never", "the policy asks for it"
    assert pod["terminationGracePeriodSeconds"] > shutdown_s > 0


def test_each_container_that_runs_ranks_has_shared_memory(objects):
    (patch,) = objects["TrainJob"]["spec"]["runtimePatches"]
    (of_runtime,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    for pod in objects["Job"]["spec"]["template"]["spec"], of_runtime["template"]["spec"]["template"]["spec"]:
        (container,), (volume,) = pod["containers"], pod["volumes"]
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
        assert volume["emptyDir"]["medium"] == "Memory"
    assert of_runtime["name"] == of_runtime["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"


def test_a_rank_has_a_gpu_in_a_trainjob(objects):
    trainer = objects["TrainJob"]["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


@pytest.mark.slow
def test_job_and_service_keep_the_schemas_of_kubernetes(objects):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate, for its schemas")
    for kind in ("Job", "Service"):
        validator.validate(objects[kind], "1.37", strict=True)


@pytest.mark.slow
def test_a_trainjob_has_only_fields_that_kubeflow_knows(objects):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    read = models.TrainerV1alpha1TrainJob.from_dict(objects["TrainJob"])
    assert read.to_dict() == objects["TrainJob"]


def test_the_page_shows_the_manifests_as_they_are():
    page = (ROOT / "chapters" / "80_job_managers.md").read_text("utf-8")
    assert all(f"```yaml\n{path.read_text('utf-8')}```" in page for path in FOLDER.glob("*.yaml"))


def plain() -> tuple[dict[str, str], str, str, str | None]:
    """In a rank that leaves everything to torch: (backends, device of messages, of lanes, backend of a trace)."""
    dist.init_process_group()
    trace = execute(ring_all_reduce(dist.get_world_size()))
    return message_backends(), str(message_device()), str(lanes(2).device), trace.backend


@pytest.mark.slow
def test_the_device_follows_from_the_process_group_not_its_name():
    run = launch(plain, 2)
    kind = "cuda" if run.backend == "nccl" else "cpu"
    for rank, (backends, messages, device, backend) in enumerate(run):
        assert backends == {kind: run.backend} and backend == run.backend
        assert messages == device == (f"cuda:{rank}" if kind == "cuda" else "cpu")


def test_gloo_takes_messages_from_the_cpu_wherever_it_runs():
    def gloo() -> tuple[str, str, str | None]:
        dist.init_process_group("gloo")
        return str(message_device()), str(lanes(2).device), execute(ring_all_reduce(2)).backend

    assert list(launch(gloo, 2)) == [("cpu", "cpu", "gloo")] * 2


def test_messages_come_from_the_device_that_a_rank_was_given():
    def given() -> tuple[str, str]:
        device = rank_device()
        dist.init_process_group()
        return str(device), str(message_device())

    for device, messages in launch(given, 2):
        assert device == messages


@pytest.mark.parametrize("local_rank, current, num_visible, number", [
    (2, 0, 4, 2),  # nobody has chosen: GPU 0 is current everywhere
    (2, 1, 4, 1),  # the program has chosen
    (2, 0, 1, 0),  # the launcher shows each rank its own GPU alone
])
def test_each_rank_has_its_own_gpu_under_nccl(monkeypatch, local_rank, current, num_visible, number):
    """What torch would answer on a machine with GPUs, so that the choice is tested where there is none."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert message_device() == torch.device("cuda", number)
    finally:
        dist.destroy_process_group()
