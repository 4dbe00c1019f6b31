"""Lab 12's training survives kills in each phase of a step: no checkpoint is lost, and no process is left."""
import subprocess
from dataclasses import replace

import pytest

from tests import kills
from tests.kills import EVERY, NUM_STEPS, PHASES, Found, Kill, problems, table

KILL = Kill("rank", "forward", 0, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True], ids=["launch", "torchrun"])
def test_a_killed_training_loses_no_checkpoint_and_resumes_exactly(elastic):
    found = list(kills.kills(2, seed=5, elastic=elastic))
    assert len(found) >= 2 and [one.problem for one in found] == [""] * len(found)


@pytest.mark.parametrize("killed_in, checkpoint, resumed, wrong, problem", [
    (4, 3, 3, (), ""),
    (5, 6, 6, (), ""),
    (7, 3, 3, (), "a checkpoint is lost"),
    (4, 3, 0, (), "a checkpoint is lost"),
    (4, 3, 3, (8,), "wrong losses in steps [8]"),
    (4, 3, 0, (8,), "a checkpoint is lost; wrong losses in steps [8]"),
    (4, 3, 4, (), "resumed in steps [4]"),
    (4, 3, None, (), "the training did not end"),
])
def test_what_goes_wrong_after_a_kill_is_reported(tmp_path, killed_in, checkpoint, resumed, wrong, problem):
    want = recorded(tmp_path, killed_in, checkpoint)
    if resumed is not None:
        logged(tmp_path, 1, {step: want[step] + (step in wrong) * 1e-9 for step in range(resumed, NUM_STEPS)})
    (found,) = problems(tmp_path, [KILL, KILL], want)
    assert found.problem == problem and found.checkpoint == checkpoint and EVERY == 3


def test_a_checkpoint_lost_by_a_start_that_took_no_step_is_reported(tmp_path):
    want = recorded(tmp_path, 7, 6)
    logged(tmp_path, 1, {})
    (tmp_path / "kill1.json").write_text('{"num_ranks": 2, "rank": 1, "step": -1, "checkpoint": 3}')
    logged(tmp_path, 2, {step: want[step] for step in range(3, NUM_STEPS)})
    assert [one.problem for one in problems(tmp_path, [KILL, KILL], want)] == ["a checkpoint is lost", ""]


@pytest.mark.parametrize("what, problem", [
    ("rank", "the training did not end"), ("agent", "wrong losses in steps [8]")])
def test_a_rank_whose_agent_dies_must_stay_right(tmp_path, what, problem):
    want = recorded(tmp_path, 4, 3)
    num_steps = NUM_STEPS if what == "agent" else 5
    logged(tmp_path, 0, {step: want[step] + (step == 8) * 1e-9 for step in range(num_steps)})
    (found,) = problems(tmp_path, [replace(KILL, what=what)], want)
    assert found.problem == problem


def test_a_process_is_left_until_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "GONE_S", 0.2)
    with subprocess.Popen(["sleep", "600"]) as process:
        (tmp_path / f"pid{process.pid}").touch()
        assert kills.left(tmp_path, []) == kills.left(tmp_path / "none", [process.pid]) == [process.pid]
        process.kill()
        monkeypatch.setattr(kills, "GONE_S", 60)
        assert kills.left(tmp_path, []) == []  # a zombie: nobody has waited for it yet


def test_the_table_counts_kills_by_phase_and_victim_and_what_followed():
    found = [Found(KILL, 2, 1, 4, 3), Found(KILL, 2, 0, 4, 3, lost=True, wrong="the training did not end"),
             Found(replace(KILL, what="agent"), 3, 0, 4, 3, left=2, launcher="torchrun")]
    rows = {line.split("  ")[0]: line.split()[-10:] for line in table(found).splitlines()[2:]}
    assert rows["forward"] == rows["all"] == ["1", "1", "0", "0", "0", "1", "3", "1", "1", "1"]
    assert all(set(rows[phase]) == {"0"} for phase in PHASES if phase != "forward")


def recorded(folder, step, checkpoint):
    """Record a kill in this step; the losses of an undisturbed training."""
    (folder / "kill0.json").write_text(f'{{"num_ranks": 2, "rank": 1, "step": {step}, "checkpoint": {checkpoint}}}')
    return {step: 1 / (1 + step) for step in range(NUM_STEPS)}


def logged(folder, after_kills, losses):
    (folder / f"log{after_kills}.jsonl").write_text("".join(
        f'{{"after_kills": {after_kills}, "step": {step}, "loss": {loss}}}\n' for step, loss in losses.items()))
