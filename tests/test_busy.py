"""A short run of what `python -m tests.busy` does for every lab."""
import pytest

from book.grading.trial import solution
from tests.answers import LABS
from tests.busy import busy, verdict

LAB = LABS["01_ranks"]


@pytest.mark.slow
def test_a_solution_passes_beside_busy_loops_and_a_wrong_answer_does_not():
    right = solution(LAB, 1)
    with busy(2):
        assert verdict(LAB, 1, right) is None
        assert "CheckFailed" in verdict(LAB, 1, right.replace("dist.send(buffer,", "dist.send(buffer + 1,"))
