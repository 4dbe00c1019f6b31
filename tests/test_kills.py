"""Lab 11's training goes on after kills at drawn moments: nothing is lost, and no process is left."""
import pytest

from tests import kills

READS = ["labs/11_when_a_rank_dies.ipynb"]


@pytest.mark.full
def test_a_killed_training_loses_no_checkpoint_and_goes_on_alike():
    found = list(kills.kills(4, seed=5))
    assert len(found) >= 4 and [kill.problem for kill in found] == [""] * len(found)
