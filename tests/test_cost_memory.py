"""Bytes of state: the ZeRO paper's own figures, and what is divided by N."""
import pytest

from book.cost import ADAM_32, ADAM_MIXED, ADAM_MIXED_GRADIENTS_32, StateBytes, state_bytes


def test_the_papers_row_of_7_5_billion_on_64_ranks():
    found = [round(state_bytes(7.5e9, stage, 64).total / 1e9, 1) for stage in range(4)]
    assert found == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("each, total", [(ADAM_MIXED, 16), (ADAM_MIXED_GRADIENTS_32, 18), (ADAM_32, 16)])
def test_bytes_of_one_parameter(each, total):
    assert each.total == state_bytes(1, each=each).total == total


@pytest.mark.parametrize("stage, shards", [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))])
def test_a_stage_shards_one_more_of_the_three(stage, shards):
    found = state_bytes(100, stage, 4, StateBytes(2, 3, 5))
    assert (found.parameters, found.gradients, found.optimizer) == tuple(
        100 * size / shard for size, shard in zip((2, 3, 5), shards))


@pytest.mark.parametrize("stage", range(4))
def test_one_shard_holds_everything(stage):
    assert state_bytes(10, stage, 1) == state_bytes(10)


@pytest.mark.parametrize("arguments, words", [((10, 4, 2), "no ZeRO stage 4"), ((10, -1, 2), "no ZeRO stage -1"),
                                             ((10, 3, 0), "num_shards is 0")])
def test_invalid_input_raises_a_clear_error(arguments, words):
    with pytest.raises(ValueError, match=words):
        state_bytes(*arguments)
