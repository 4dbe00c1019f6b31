"""L3: what a run sent, against what its algorithm has to send."""
from __future__ import annotations

from typing import Any

import numpy as np

from book import cost
from book.checks.verdict import CheckFailed, listed, number
from book.trace import Trace


def point_to_point(trace: Trace) -> int:
    """The run must have used sends and receives only. Returns how many messages were sent."""
    collectives = trace.of_kind("collective")
    used = sorted({event.op for event in collectives} - {"barrier"})
    if used:
        raise CheckFailed(f"your run called {used[0]}: here you build it yourself, from sends and receives")
    num_messages = len(trace.of_kind("send"))
    if not num_messages:
        raise CheckFailed("your run sent no message at all: is there any send in your function?")
    return num_messages


def ring_traffic(trace: Trace, length: int, element_bytes: int) -> float:
    """Every rank must have sent 2(N-1) chunks of a buffer of `length` elements, all of them to one neighbour.

    Returns the bytes that rank 0 sent. Raises CheckFailed when the busiest rank sent more than 2(N-1)/N of the buffer
    (with chunks rounded up), when a rank sent less (rounded down), or when it had several partners.
    """
    world_size, sent, num_bytes = trace.world_size, trace.sent_bytes(), length * element_bytes
    if world_size == 1:
        return 0.0
    point_to_point(trace)
    num_messages = 2 * (world_size - 1)
    least, most = (num_messages * size * element_bytes for size in (length // world_size, -(-length // world_size)))
    busiest, laziest = int(np.argmax(sent)), int(np.argmin(sent))
    if sent[busiest] > most:
        why = _why_too_much(sent[busiest], num_bytes, world_size)
        raise CheckFailed(f"rank {busiest} sent {sent[busiest] / num_bytes:.2f} times the buffer, a ring sends "
                          f"{num_messages / world_size:.2f} times: {why}")
    if sent[laziest] < least:
        raise CheckFailed(f"rank {laziest} sent only {sent[laziest] / num_bytes:.2f} times the buffer, a ring sends "
                          f"{num_messages / world_size:.2f} times: who does its part of the work?")
    for rank in range(world_size):
        partners = sorted({e.peer for e in trace.of_kind("send") if e.rank == rank})
        if len(partners) > 1:
            raise CheckFailed(f"rank {rank} sent to ranks {listed(partners)}: in a ring it talks to one "
                              f"neighbour only")
    return float(sent[0])


def ring_cost(answer: Any, trace: Trace, length: int, element_bytes: int) -> tuple[float, float]:
    """`answer` must be (rounds, bytes that each rank sends) of the ring all-reduce that `trace` recorded; returned."""
    sent = ring_traffic(trace, length, element_bytes)
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        raise CheckFailed("return two numbers, the rounds and the bytes that a rank sends, not "
                          f"{type(answer).__name__}")
    num_bytes, world_size = length * element_bytes, trace.world_size
    rounds = number("the number of rounds", answer[0], trace.num_steps, [
        (sent, "that is the number of bytes: the rounds come first"),
        (world_size - 1, "that is the reduce-scatter alone, the all-gather takes as many"),
        (2 * world_size, "the last contribution has N-1 links to go, not N, in either half")])
    return rounds, number("the number of bytes that a rank sends", answer[1], sent, [
        (sent / 2, "that is the reduce-scatter alone, the all-gather sends as much again"),
        (2 * num_bytes, "that is the limit for many ranks; a rank never sends its last chunk"),
        (num_bytes, "that is the buffer once; either half of the ring sends all of it but one chunk"),
        (num_bytes / world_size, "that is one chunk; a rank sends one in each round"),
        (cost.root_sent_bytes(world_size, num_bytes),
         "that is the traffic of a root, which sends the whole buffer to each of the others"),
        (sent * world_size, "that is what all ranks send together, or the whole buffer in every round"),
        (sent / element_bytes, f"that counts elements: each has {element_bytes} bytes")])


def bus_bandwidth(answer: Any, world_size: int, num_bytes: float, seconds: float) -> float:
    """`answer` must be the bus bandwidth, in bytes per second, of an all-reduce of `num_bytes`; returns it."""
    wanted = cost.bus_bandwidth_bytes_per_s("all_reduce", world_size, num_bytes, seconds)
    return number("the bus bandwidth", answer, wanted, [
        (num_bytes / seconds,
         "that is the algorithm bandwidth, bytes over seconds; multiply by the share that each link carries"),
        (wanted / 2, "the share is (N-1)/N for a reduce-scatter; an all-reduce does that twice"),
        (wanted / 1e9, "that is in GB/s; leave it in bytes per second"),
        (wanted * 8, "that is in bits; leave it in bytes per second"),
        (1 / wanted, "you have seconds over bytes"),
        (wanted / (2 * (world_size - 1) / world_size)**2, "the share is upside down, it is 2(N-1)/N"),
        (wanted * world_size, "each link carries 2(N-1)/N of the buffer; the division by N is missing"),
        (wanted * seconds, "divide by the seconds"),
        (wanted * seconds**2, "divide by the seconds, you have multiplied")])


def _why_too_much(sent_bytes: float, num_bytes: float, world_size: int) -> str:
    if sent_bytes >= (world_size - 1) * num_bytes and world_size > 2:
        return "that is the traffic of a root, or of whole buffers passed around; send one chunk a step"
    return "is one of the steps made too often, or more than a chunk sent in a step?"
