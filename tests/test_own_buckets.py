"""Which of a module's own buckets a copy of gradients is identified as."""
import pytest
import torch
from torch import nn

from book.record.buckets import OwnBuckets


@pytest.fixture
def model():
    """Three layers of equal size, each with its own bucket; the first two have the same gradient."""
    made = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    made.buckets = [[layer.weight] for layer in made]
    for layer, value in zip(made, (0.0, 0.0, 1.0)):
        layer.weight.grad = torch.full((2, 2), value)
    return made


def carried(model, copy, *order):
    """The bucket of a copy when the gradients of these layers have become ready in this order."""
    ready = {model[layer].weight: place for place, layer in enumerate(order)}
    return OwnBuckets(model, model.parameters()).carried([torch.tensor(copy)], ready)[0]


def test_of_indistinguishable_buckets_the_first_complete_one_is_taken(model):
    assert carried(model, [0.0] * 4, 1, 0) == 1
    assert carried(model, [0.0] * 4, 0, 1) == 0
    assert carried(model, [0.0] * 4, 2, 1, 0) == 2


def test_contents_take_precedence_over_order(model):
    assert carried(model, [0.5] * 4, 1, 0, 2) == 2


def test_a_bucket_that_is_not_complete_or_of_another_size_is_not_taken(model):
    assert carried(model, [1.0] * 4, 0) == 0
    assert carried(model, [1.0] * 8, 0, 1, 2) is None
