"""The page on parameter servers: its schedule, its formula for staleness, and every argument of RPC's calls."""
from __future__ import annotations

import inspect
import re
from math import pi, sin
from typing import Any

import numpy as np
import pytest
from torch.distributed import rpc

from book.cost import Link, ring_sent_bytes
from book.simulate import simulate
from tests.test_chapters import cells

PAGE = "08_parameter_server"
CALLS = {"init_rpc": [rpc.init_rpc], "TensorPipeRpcBackendOptions": [rpc.TensorPipeRpcBackendOptions.__init__],
         "rpc_sync": [rpc.rpc_sync, rpc.rpc_async, rpc.remote], "shutdown": [rpc.shutdown]}


@pytest.fixture(scope="module")
def servers() -> Any:
    """The function of the first cell."""
    namespace: dict[str, Any] = {}
    exec(cells(PAGE, "code")[0].partition("network =")[0], namespace)
    return namespace["servers"]


@pytest.mark.parametrize("world_size, num_servers", [(2, 1), (4, 1), (4, 2), (4, 4), (6, 3), (12, 4), (9, 9)])
def test_servers_send_what_the_page_says(servers: Any, world_size: int, num_servers: int) -> None:
    schedule = servers(num_servers, world_size)
    schedule.check()
    num_bytes = 360.0
    sent = simulate(schedule, num_bytes, Link(0.0, 1.0)).sent_bytes()
    assert sent.max() == pytest.approx((world_size + num_servers - 2) / num_servers * num_bytes)
    if num_servers == world_size:
        assert sent == pytest.approx([ring_sent_bytes(world_size, num_bytes)] * world_size)


@pytest.mark.parametrize("staleness", range(9))
def test_the_limit_is_where_a_root_leaves_the_unit_circle(staleness: int) -> None:
    """w(t+1) = w(t) - eta w(t - staleness), so z^(staleness+1) - z^staleness + eta = 0."""
    limit = 2 * sin(pi / (2 * (2 * staleness + 1)))
    for factor, settles in ((0.99, True), (1.01, False)):
        polynomial = np.zeros(staleness + 2)
        polynomial[[0, 1]] = 1, -1
        polynomial[-1] += factor * limit
        assert (np.abs(np.roots(polynomial)).max() < 1) == settles


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_explained_with_its_default(name: str) -> None:
    page = "\n".join(cells(PAGE, "markdown"))
    entry = re.search(rf"^`{name}`.*\n: (.*)$", page, re.M)
    explained = dict(reversed(re.findall(r"`(\w+)(?:=([^`]+))?`", entry[1])))  # the first mention counts
    for call in CALLS[name]:
        for parameter in inspect.signature(call).parameters.values():
            if parameter.name == "self" or parameter.name.startswith("_"):
                continue
            default = "" if parameter.default is parameter.empty else repr(parameter.default)
            assert explained[parameter.name] == default
