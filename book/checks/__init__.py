"""L3: verdicts on a learner's run; a wrong one is told which misconception it looks like.

    verdict     CheckFailed, and the check of a single number
    buffers     what the ranks' buffers hold after a collective
    traffic     what a run sent
    copies      whose data ranks hold after a broadcast, an all-gather, an all-to-all
    groups      sums over rows and columns of ranks, in disorder, and where a rank has nothing to add

Every check raises `CheckFailed` with one sentence, or returns a number that depends on the run's data, for the cell to
print: a stored "ok" would prove nothing.
"""
from book.checks.buffers import all_gather, all_reduce, contributions, neighbour_exchange, reduce_scatter
from book.checks.copies import all_gather_rows, all_to_all_rows, broadcast, received_once, rows_sent
from book.checks.groups import on_grid, sample_mean, summed_metrics
from book.checks.traffic import bus_bandwidth, point_to_point, ring_cost, ring_traffic
from book.checks.verdict import CheckFailed, number

__all__ = ["CheckFailed", "all_gather", "all_gather_rows", "all_reduce", "all_to_all_rows", "broadcast",
           "bus_bandwidth", "contributions", "neighbour_exchange", "number", "on_grid", "point_to_point",
           "received_once", "reduce_scatter", "ring_cost", "ring_traffic", "rows_sent", "sample_mean", "summed_metrics"]
