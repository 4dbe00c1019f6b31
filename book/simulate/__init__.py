"""L2: what a schedule would do, worked out without starting a process.

    collective   simulate: chunks on links that take time
    alike        done_s: when each rank is done, at any number of ranks
    shared       the same where ranks share their node's network cards
    messages     which moves of a schedule travel together
    streams      a step on two streams: buckets behind a backward, sharded state
    pipeline     simulate_pipeline: forwards and backwards that take time, and what travels between the stages
    hybrid       simulate_step: a step on a mesh of pp, dp and tp, at any number of ranks
"""
from book.simulate.alike import done_s
from book.simulate.collective import LARGEST_WATCHED_WORLD, simulate
from book.simulate.hybrid import StepTimes, StepWork, simulate_step
from book.simulate.pipeline import simulate_pipeline

__all__ = ["LARGEST_WATCHED_WORLD", "StepTimes", "StepWork", "done_s", "simulate", "simulate_pipeline", "simulate_step"]
