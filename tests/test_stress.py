"""A short run of `python -m tests.stress`: no process is left when kernels and launches end."""
import sys

import pytest

from tests.stress import survivors

pytestmark = [pytest.mark.full, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
READS = ["tests/stress.py"]


def test_nothing_is_left_of_killed_and_restarted_kernels_and_interrupted_launches():
    left = survivors(times=2, seed=7)
    assert left == {"killed kernels": [0, 0], "restarted kernels": [0, 0], "interrupted launches": [0, 0]}
