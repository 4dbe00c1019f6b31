"""The pages on parameter servers: schedule, formula for staleness, and every argument of RPC's calls."""
from __future__ import annotations

import inspect
import os
import re
import threading
from math import pi, sin
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import rpc

from book.cost import Link, ring_sent_bytes
from book.launch import RankError, launch
from book.simulate import simulate
from tests.test_chapters import cells

PAGE, ARGUMENTS = "08_parameter_server", "88_rpc_in_pytorch"
READS = ["chapters/08_parameter_server.ipynb", "chapters/88_rpc_in_pytorch.ipynb"]
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


@pytest.mark.parametrize("staleness", range(1, 9))
def test_the_best_rate_is_where_two_roots_meet(staleness: int) -> None:
    """There the largest root is staleness / (staleness + 1), and a little beside it a larger one."""
    best = staleness**staleness / (staleness + 1) ** (staleness + 1)

    def largest(rate: float) -> float:
        return np.abs(np.roots([1, -1, *[0] * (staleness - 1), rate])).max()

    assert largest(best) == pytest.approx(staleness / (staleness + 1), abs=1e-6)
    assert min(largest(0.99 * best), largest(1.01 * best)) > largest(best) + 1e-4


def server(name: str) -> Any:
    """A server of the page, made as the page makes it."""
    namespace: dict[str, Any] = {"torch": torch, "rpc": rpc, "threading": threading}
    source = next(cell for cell in cells(PAGE, "code") if f"class {name}" in cell)
    exec(source.partition("looked_up, (bytes_in")[0], namespace)
    arguments = {"ParameterServer": (1,), "AsynchronousServer": (torch.ones(1), 0.1), "TableServer": (4, 2)}
    return namespace[name](*arguments[name])


@pytest.mark.parametrize("name", ["ParameterServer", "AsynchronousServer", "TableServer"])
def test_nobody_pulls_in_the_middle_of_a_step(name: str) -> None:
    held = server(name)
    arguments = (torch.tensor([1]),) if name == "TableServer" else ()
    pull = threading.Thread(target=held.pull, args=arguments, daemon=True)
    with held.lock:
        pull.start()
        pull.join(0.2)
        assert pull.is_alive()
    pull.join(20)
    assert not pull.is_alive()


@pytest.mark.slow
def test_init_rpc_does_not_read_the_rank_from_the_environment() -> None:
    def join() -> None:  # in here, so that a rank need not import this module
        rpc.init_rpc(f"worker{os.environ['RANK']}", world_size=2)

    with pytest.raises(RankError, match="worker_id"):
        launch(join, 2)


@pytest.mark.slow
def test_init_rpc_does_not_read_the_world_size_from_the_environment() -> None:
    def join() -> tuple[str, str] | None:
        if os.environ["RANK"] != "0":
            return None  # rank 1 never joins
        rpc.init_rpc("worker0", rank=0)
        here, missing = rpc.rpc_sync("worker0", rpc.get_worker_info).name, ""
        try:
            rpc.rpc_sync("worker1", rpc.get_worker_info)
        except RuntimeError as error:
            missing = str(error)
        rpc.shutdown()
        return here, missing

    here, missing = launch(join, 2)[0]
    assert here == "worker0"
    assert "could not find destination name worker1" in missing


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_explained_with_its_default(name: str) -> None:
    page = "\n".join(cells(ARGUMENTS, "markdown"))
    entry = re.search(rf"^`{name}`.*\n: (.*)$", page, re.M)
    explained = dict(reversed(re.findall(r"`(\w+)(?:=([^`]+))?`", entry[1])))  # the first mention counts
    for call in CALLS[name]:
        for parameter in inspect.signature(call).parameters.values():
            if parameter.name == "self" or parameter.name.startswith("_"):
                continue
            default = "" if parameter.default is parameter.empty else repr(parameter.default)
            assert explained[parameter.name] == default
