"""L2: what a schedule would do, worked out without starting a process.

    collective   simulate: chunks on links that take time
    at_scale     done_s: when each rank is done, at any number of ranks, one simulated for all that are alike
    shared       the same where ranks share their node's network cards
    messages     which moves of a schedule travel together
    streams      a step on two streams: simulate_backward, with buckets behind a backward; sharded state
    pipeline     simulate_pipeline: forwards and backwards that take time, and what travels between the stages
    step         simulate_step: a step on a mesh of pp, dp and tp, at any number of ranks
    product      simulate_product, simulate_mlp: matrices that ranks have cut
    sharded      simulate_sharded: what ranks hold of a model's state in a step with ZeRO
    on_mesh      simulate_groups, simulate_hybrid: collectives and pipelined steps on a mesh
"""
from book.simulate.at_scale import done_s
from book.simulate.collective import LARGEST_WATCHED_WORLD, simulate
from book.simulate.on_mesh import simulate_groups, simulate_hybrid
from book.simulate.pipeline import simulate_pipeline
from book.simulate.product import simulate_mlp, simulate_product
from book.simulate.sharded import simulate_sharded
from book.simulate.step import StepTimes, StepWork, simulate_step
from book.simulate.streams import simulate_backward

__all__ = ["LARGEST_WATCHED_WORLD", "StepTimes", "StepWork", "done_s", "simulate", "simulate_backward",
           "simulate_groups", "simulate_hybrid", "simulate_mlp", "simulate_pipeline", "simulate_product",
           "simulate_sharded", "simulate_step"]
