"""L2: a backward in two halves: first the gradient of the input, later those of the weights.

Autograd computes both in one pass from the output to the input. The previous stage waits only for the first, and a
zero-bubble schedule (qi2024) puts the second where a rank would be idle. The halves together do as many matrix
products as the whole; what both need stays in memory until the second is done.
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class SplitBackward:
    """The first half of a backward from `y` to `x`: `input_gradient` is x's; `backward_weights()` does the other half.

    `gradient` is that of `y`, None for a loss. If `x` needs no gradient, as with token numbers, everything is left for
    the second half. Raises ValueError for a weight that is used in two places, which can't be split.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        self.input_gradient, self.later = None, []
        if not x.requires_grad:
            self.later.append(partial(y.backward, gradient))
            return
        fed = _fed_on_the_way(y, x)
        arrived: dict[Node, tuple[torch.Tensor | None, ...]] = {}
        hooks = [node.register_prehook(partial(arrived.__setitem__, node)) for node in fed]
        (self.input_gradient,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        for hook in hooks:
            hook.remove()
        self.later += [partial(_backward_from, node, arrived[node], weights) for node, weights in fed.items()]

    def backward_weights(self) -> None:
        """Add the weights' gradients to what they have; a second call adds nothing."""
        while self.later:
            self.later.pop()()


def _backward_from(node: Node, gradients: tuple[torch.Tensor | None, ...], weights: list[torch.Tensor]) -> None:
    """Continue backward from a node, with the gradients that arrived there, to the weights that feed it."""
    there = [(GradientEdge(node, number), gradient) for number, gradient in enumerate(gradients)
             if gradient is not None]
    edges, gradients = zip(*there)
    torch.autograd.backward(edges, gradients, inputs=weights)


def _fed_on_the_way(y: torch.Tensor, x: torch.Tensor) -> dict[Node, list[torch.Tensor]]:
    """The nodes on the path from `y` to `x` that weights feed, with those weights: the backward is split at these."""
    end = get_gradient_edge(x).node
    on_the_way = {end}
    beside: dict[Node, list[torch.Tensor]] = {}
    fed: dict[Node, list[torch.Tensor]] = {}
    for node in _children_first(y.grad_fn):
        children = [child for child, _ in node.next_functions if child is not None]
        weights = list({weight: None for child in children if child not in on_the_way for weight in beside[child]})
        if node is end:
            continue
        if on_the_way.isdisjoint(children):
            beside[node] = [node.variable] if hasattr(node, "variable") else weights
            continue
        on_the_way.add(node)
        if weights:
            fed[node] = weights
    used = [id(weight) for weights in fed.values() for weight in weights]
    if len(used) > len(set(used)):
        raise ValueError("a weight of this stage is used in two places: its backward can't be split into I and W, so "
                         "run it whole, as B")
    return fed


def _children_first(root: Node) -> Iterator[Node]:
    """All nodes reachable from `root`, itself included, each after those it leads to (postorder)."""
    stack, seen = [(root, False)], set()
    while stack:
        node, known = stack.pop()
        if known:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
