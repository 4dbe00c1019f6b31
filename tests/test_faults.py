"""What failures cost: the best interval between checkpoints, and runs in which nodes fail."""
import math
from dataclasses import replace

import pytest

from book.faults import Job, daly, expected_goodput, run, young

JOB = Job(num_nodes=100, mtbf_s=100 * 10_000, save_s=60, restart_s=120)


def best_interval(job):
    """The interval of the largest expected goodput, found by trying many."""
    tried = [job.save_s * 1.002 ** k for k in range(-2000, 6000)]
    return max(tried, key=lambda interval_s: expected_goodput(job, interval_s))


@pytest.mark.parametrize("mean_s", [1e3, 1e4, 1e6])
def test_dalys_interval_is_the_best_and_youngs_is_near(mean_s):
    job = replace(JOB, mtbf_s=100 * mean_s)
    assert daly(60, mean_s) == pytest.approx(best_interval(job), rel=0.01)
    assert young(60, mean_s) == pytest.approx(best_interval(job), rel=1.5 * math.sqrt(60 / mean_s))
    assert young(60, 1e4) == pytest.approx(1095.4, rel=1e-4)


def test_where_saving_takes_longer_than_the_job_lives_daly_saves_once_a_failure():
    assert daly(200, 100) == 100


@pytest.mark.parametrize("interval_s", [300, 1095, 4000])
def test_a_long_run_keeps_the_share_that_is_expected(interval_s):
    ended = run(JOB, interval_s, 2e7, seed=1)
    assert ended.goodput == pytest.approx(expected_goodput(JOB, interval_s), abs=0.01)
    assert ended.waiting_s == 0 and ended.num_failures == pytest.approx(2000, rel=0.1)


def test_all_seconds_of_a_run_are_accounted_for():
    ended = run(replace(JOB, repair_s=50_000, num_spares=1), 1000, 1e6, seed=3)
    kept = ended.useful_s / 1000
    assert kept == pytest.approx(round(kept)) and ended.saving_s == pytest.approx(60 * kept)
    assert 1e6 <= ended.total_s < 1e6 + 60_000 and ended.waiting_s > 0
    assert ended == run(replace(JOB, repair_s=50_000, num_spares=1), 1000, 1e6, seed=3)


def test_spares_save_the_wait_for_repairs():
    waits = [run(replace(JOB, repair_s=30_000, num_spares=k), 1095, 1e6, seed=2).waiting_s for k in (0, 2, 20)]
    assert waits[0] > 2 * waits[1] > 0 and waits[2] == 0


def test_without_failures_only_saving_costs():
    ended = run(replace(JOB, mtbf_s=1e15), 540, 6e5, seed=0)
    assert ended.goodput == pytest.approx(0.9) and ended.num_failures == 0 and ended.lost_s == 0


def test_an_interval_far_above_the_time_between_failures_keeps_nothing():
    assert expected_goodput(JOB, 1e7) == 0 and expected_goodput(JOB, 1e5) < 0.01


@pytest.mark.parametrize("wrong", [{"num_nodes": 0}, {"num_spares": -1}, {"mtbf_s": 0}, {"save_s": -1}])
def test_an_impossible_job_is_refused(wrong):
    with pytest.raises(ValueError, match="a job needs a node|mtbf_s must be above 0"):
        replace(JOB, **wrong)


def test_an_interval_of_zero_is_refused():
    with pytest.raises(ValueError, match="both must be above 0"):
        run(JOB, 0, 100, seed=0)
