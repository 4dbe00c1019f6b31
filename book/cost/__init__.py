"""L1: what training costs: time on links, bytes sent, bytes held.

    links        Link, and what collectives and pipelines take on it
    network      Network: nodes whose ranks share network cards
    activations  LayerShape: what a transformer layer keeps for its backward
    state        StateBytes: parameters, gradients and optimizer state on a rank, sharded or not
    tuning       Tuning: what of a model is trained: adapters, the last layers; which optimizer, and where its state is
    traffic      bytes sent: by formula, and of a recorded run by axis and link
    transformer  Transformer: parameters and FLOPs of a GPT, or of today's models
    sizes        Experts, Latent: what some models have; Sizes: a model as an estimate needs it
    layouts      Layout: how a step is cut over GPUs, and all ways to cut it
    cluster      Cluster, Overheads: what trains, and what software makes of it
    step         estimate: memory, traffic and time of a layout, or of all at once; largest_micro_batch: which fits
    terms        Terms: what a rank of each layout holds and sends;  seconds: the time of a step, part by part
    search       all layouts of a model on a cluster, the fastest that fits, and why
    published    layouts from papers, with the times of their steps;  reported: those of vendors and projects
    measured     these and some thousand more measured steps, as data sets
    models       models by name;  machines: GPUs by name, and constants fitted to measured steps
    calibration  these constants, found from measured steps
    scoreboard   how far off the planner is on models that were left out of the fit, and the error bars that follow
    question     Question: what a plan is asked for;  refusals: why nothing fits, and what would
    answer       plan: which layout for a model on so many GPUs, what it costs, how sure that is; told: of one layout
    board        the scoreboard as a text, with plans against the best published steps
    ledger       Way, STORY, entry: the ways to train of the book's story, a line each
    configs      a plan as a module for torchtitan 0.3 or options for Megatron-LM; a file of torchtitan read

Keys such as thakur2005 in the docstrings are entries of references.bib.
"""
from book.cost.activations import LayerShape, activation_bytes, gpt_activation_bytes
from book.cost.answer import LayoutAnswer, MeasuredStep, Plan, plan, told
from book.cost.links import (Link, all_to_all_s, bandwidth_bound_s, broadcast_s,
                             bus_bandwidth_bytes_per_s, fit_ring_link, gather_s, halving_doubling_all_reduce_s,
                             latency_bound_s, parameter_server_all_reduce_s, pipeline_bubble, reduce_s,
                             ring_all_gather_s, ring_all_reduce_s, ring_reduce_scatter_s, ring_sent_bytes,
                             root_sent_bytes, scatter_s, tree_all_reduce_s)
from book.cost.cluster import Cluster, Overheads
from book.cost.layouts import Layout, all_layouts, layout_of
from book.cost.machines import MACHINES, Machine, cluster_of, machine_of
from book.cost.models import MODELS, model_named
from book.cost.network import Network
from book.cost.sizes import Experts, Latent
from book.cost.state import (ADAM_32, ADAM_FSDP2, ADAM_MIXED, ADAM_MIXED_GRADIENTS_32, SHARDED_FROM, StateBytes,
                             state_bytes)
from book.cost.step import Estimate, estimate, estimates, largest_micro_batch
from book.cost.search import Search, explain, search, usable_bytes
from book.cost.traffic import (Flows, axis_name, bytes_across_nodes, bytes_by_axis, context_parallel_sent_bytes, flows,
                               hybrid_sent_bytes, num_passes, sent_bytes, sharded_sent_bytes,
                               tensor_parallel_sent_bytes)
from book.cost.transformer import Transformer
from book.cost.tuning import OPTIMIZERS, Tuning
from book.factors import BUS_FACTORS

__all__ = ["ADAM_32", "ADAM_FSDP2", "ADAM_MIXED", "ADAM_MIXED_GRADIENTS_32", "BUS_FACTORS", "MACHINES", "MODELS",
           "OPTIMIZERS", "SHARDED_FROM", "Cluster", "Estimate", "Experts", "Flows", "Latent", "LayerShape", "Layout",
           "LayoutAnswer", "Link", "Machine", "MeasuredStep", "Network", "Overheads", "Plan", "Search", "StateBytes",
           "Transformer", "Tuning", "activation_bytes", "all_layouts", "all_to_all_s", "axis_name", "bandwidth_bound_s",
           "broadcast_s", "bus_bandwidth_bytes_per_s", "bytes_across_nodes", "bytes_by_axis", "cluster_of",
           "context_parallel_sent_bytes", "estimate", "estimates", "explain", "fit_ring_link", "flows", "gather_s",
           "gpt_activation_bytes", "halving_doubling_all_reduce_s", "hybrid_sent_bytes", "largest_micro_batch",
           "latency_bound_s", "layout_of", "machine_of", "model_named", "num_passes", "parameter_server_all_reduce_s",
           "pipeline_bubble", "plan", "reduce_s", "ring_all_gather_s", "ring_all_reduce_s", "ring_reduce_scatter_s",
           "ring_sent_bytes", "root_sent_bytes", "scatter_s", "search", "sent_bytes", "sharded_sent_bytes",
           "state_bytes", "tensor_parallel_sent_bytes", "told", "tree_all_reduce_s", "usable_bytes"]
