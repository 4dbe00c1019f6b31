"""L3: verdicts on a learner's run; a wrong one is told which misconception it looks like.

    verdict     CheckFailed, and the check of a single number
    buffers     what the ranks' buffers hold after a collective
    traffic     what a run sent

Every check raises `CheckFailed` with one sentence, or returns a number that depends on the run's data, for the cell to
print: a stored "ok" would prove nothing.
"""
from book.checks.buffers import all_gather, all_reduce, contributions, neighbour_exchange, reduce_scatter
from book.checks.traffic import bus_bandwidth, point_to_point, ring_cost, ring_traffic
from book.checks.verdict import CheckFailed, number

__all__ = ["CheckFailed", "all_gather", "all_reduce", "bus_bandwidth", "contributions", "neighbour_exchange", "number",
           "point_to_point", "reduce_scatter", "ring_cost", "ring_traffic"]
