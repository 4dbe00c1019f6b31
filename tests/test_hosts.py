"""All-reduces over hosts whose ranks share a card, under torchrun: the simulator says which is faster, and how much."""
import subprocess

import pytest

from benchmarks import across
from book.hosts import CARD, Agents, Hosts, NoHosts
from tests.website import ROOT

pytestmark = pytest.mark.full
READS = ["benchmarks/programs/across_hosts.py", "examples/report_ranks.py"]


@pytest.fixture(scope="module")
def compared():
    try:
        with Hosts(1, 10**9):
            pass
    except NoHosts as reason:
        pytest.skip(str(reason))
    return across.compare(2, 2, num_rounds=3)


def test_relative_times_are_predicted_and_the_order_is_right(compared):
    assert all(abs(error) <= across.PROMISED for error in across.errors(compared).values()), compared
    by_time, by_prediction = (sorted(compared, key=lambda name: getattr(compared[name], which))
                              for which in ("measured_s", "predicted_s"))
    alike = {"tree", "halving–doubling"}  # predicted to take the same time
    assert [name for name in by_time if name not in alike] == [name for name in by_prediction if name not in alike]


def test_with_a_link_for_each_pair_of_ranks_the_prediction_is_wrong(compared):
    ring, crossing = compared["ring"], compared["halving–doubling"]
    assert crossing.unshared_s < ring.unshared_s and crossing.measured_s > ring.measured_s


def test_no_host_is_left(compared):
    assert "lockstep" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_both_directions_of_a_card_are_limited():
    try:
        with Hosts(2, 80_000_000) as hosts:
            shown = [subprocess.run(["ip", "netns", "exec", namespace, "tc", "class", "show", "dev", device],
                                    capture_output=True, text=True).stdout
                     for namespace, device in ((hosts._host(1), CARD), (hosts._switch, "p1"))]
    except NoHosts as reason:
        pytest.skip(str(reason))
    assert all("1:9" in classes and "rate 80Mbit" in classes for classes in shown), shown


def test_agents_on_this_machine_form_one_group_without_hosts():
    with Agents(2) as agents:
        told = agents.torchrun(2, [str(ROOT / "examples" / "report_ranks.py")])
    ranks = sorted(line.split(", node")[0] for line in told.splitlines())
    assert ranks == [f"rank {rank} of 4, local rank {rank % 2}" for rank in range(4)]
    assert str(agents).startswith("2 agents on this machine")


def test_a_program_that_fails_is_reported_with_its_host(tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit('no such data')")
    with Agents(1) as agents, pytest.raises(NoHosts, match=r"(?s)host 0: .*no such data"):
        agents.torchrun(1, [str(tmp_path / "fails.py")])
