"""L3: verdicts on a learner's run; if it is wrong, the verdict names the likely misconception.

    verdict       CheckFailed, what raises it, and the comparisons that checks share
    attribution   what a tensor is made of: its coefficients, the pattern that they form, and the lab's sentence for it
    collectives   lab 1: whose data ranks hold after copies, and over which ranks they summed
    data_parallel lab 2: averaged gradients, the state at the start and at the end, the epochs
    global_batch  lab 2: the first step and the losses of a batch that ranks share out
    buckets       lab 2: what is in a bucket, and when it was sent
    replicas      lab 2: what threads computed, and what came back to the module
    ring          lab 3: buffers after a ring all-reduce, what it sends and costs
    sharded       lab 4: steps with sharded state: who updates what, with which gradient; checkpoints of it
    sharded_state lab 4: what ranks hold of sharded state and when, what they send, how they clip
    tensor        lab 5: a linear map that is cut, the operators between the cuts, modules made of these
    tensor_model  lab 5: a loss that is cut by vocabulary, dropout masks, what a split GPT sends and holds
    pipeline      lab 6: what stages hold and send, over a process group, over RPC, in replicas
    orders        lab 6: in which order ranks ran, what they kept, how much they were idle
    mesh          lab 7: coordinates on a mesh, the groups of its axes, what crosses nodes
    hybrid        lab 7: a training step on a mesh: who holds which part, whose gradients
    hybrid_steps  lab 7: what a step was built from, its losses and updates, what it sent; torch's own parts
    parameter_server  lab 8: what a server answers and when, and which pushes its steps are made of
    interleaved   lab 8: two calls at once, interleaved at every possible place
    planner       lab 9: what a rank of a layout holds and sends, the seconds of a step, the layout to choose
    unwritten     every lab: answers that are not written yet, each reported in a line by the cells that need it
    frameworks    lab 10: what frameworks hide: accumulation, which rank sees which rows, uneven batches
    recovery      lab 11: the guilty rank, what a checkpoint holds and when it is whole, a run that goes on after a kill
    hosts         lab 12: variables of ranks on several hosts, a measured link, what crosses, who shares a card

A check compares what ranks hold with what they should hold. Where these differ, `attribution` finds the coefficients of
the contributions that the wrong tensor is made of, and the pattern that they form; a table in the lab's module has a
sentence for each pattern. For anything that is not a sum of contributions, such as an order or a recording, the
sentence stands beside the condition, in `require` and `refuse`. For a single number, `number` is given the values that
mistakes lead to.

Every check raises `CheckFailed` with one sentence that names the likeliest reason. An exercise's last check returns
what the cell prints, which depends on the run's data: a stored "ok" would prove nothing.
"""
from book.checks.buckets import (
    awaited, bucket_layout, bucket_traffic, laid_alike, num_sent_bytes, started_in_backward, untouched_in_flight,
)
from book.checks.collectives import (
    all_gather_rows, all_to_all_rows, broadcast, names_of_no_order, on_grid, received_once, rows_sent, sample_mean,
    summed_metrics,
)
from book.checks.data_parallel import (
    accumulated, averaged, averaged_in_bits, epochs, same_state, trained_alike, weights_kept,
)
from book.checks.frameworks import (
    found_hidden, global_batches, gradients_cleared, num_window_steps, same_weights_on, synchronised_once,
    uneven_failure, uneven_gradient, window_gradient,
)
from book.checks.global_batch import first_step, global_losses
from book.checks.hosts import (
    crossing_bytes, environments, handed_out, hierarchical_failure, measured_link, predicted_ratio, shared_cards,
)
from book.checks.hybrid import drawn_alike, mesh_failure, mesh_gradients, parts_on_mesh
from book.checks.hybrid_steps import (
    by_hand, calls_into, first_losses, mesh_losses, moved, one_run_a_step, placements, resumed, saved, torch_failure,
    traffic_by_axis, units_of_blocks,
)
from book.checks.interleaved import as_if_in_turn
from book.checks.mesh import (
    all_axes, crossing, groups_of_axis, members, own_pipeline, places, same_group, within_groups,
)
from book.checks.orders import (
    activations_kept, bubble_share, gpipe_order, one_f_one_b_order, peaks_in_flight, predicted_pipeline, where_stuck,
)
from book.checks.parameter_server import (
    answer_kept, answered_together, applied_at_once, asked_by_learner, asked_once, held_back, is_future, late_push,
    lock_given_back, looked_up, newest_given, next_round_waits, no_lost_update, not_moved_yet, round_step, same_answers,
    server_failure,
)
from book.checks.pipeline import (
    batch_loss, failure_of_replicas, first_updates, from_stage_to_stage, gradients_of_replicas, in_company,
    input_of_stage, losses_of_replicas, losses_of_steps, micro_batch_losses, neighbour, next_action, nothing_kept,
    remote_failure, rows_in_calls, same_outputs, same_replicas, same_weights, shares_of_replicas, stage_gradients,
    stage_parts,
)
from book.checks.planner import chosen_layout, held_on_rank, step_seconds, traffic_slips
from book.checks.recovery import (
    batches_differ, batches_drawn, global_gradient, guilty_ranks, kept_apart, loaded_state, lost_share, same_batches,
    same_losses, save_failure, save_interval, state_put_back, trained_as_one, went_on, whole_checkpoint,
)
from book.checks.replicas import Meeting, replica_gradients
from book.checks.ring import (
    all_gather, all_reduce, bus_bandwidth, chunks_in_words, neighbour_exchange, point_to_point, reduce_scatter,
    ring_cost, ring_traffic,
)
from book.checks.sharded import (
    continued, load_failure, parts_without_zeros, saved_once, saving_failure, sharded_training, training_failure,
)
from book.checks.sharded_state import (
    clipped, counted_bytes, fewest, gathered_in_place, gradients_dropped, gradients_left, gradients_sharded,
    held_in_time, nothing_behind, optimizer_sharded, parameters_sharded, predicted_state, sharded_traffic,
)
from book.checks.tensor import (
    column_outputs, computed, keeps_dtype, left_alone, operator, row_outputs, shapes_in_words, shard_shapes,
    split_module,
)
from book.checks.tensor_model import (
    block_count, dropout_masks, split_traffic, vocabulary_loss, vocabulary_traffic,
)
from book.checks.unwritten import install as _report_unwritten_answers
from book.checks.verdict import CheckFailed, explained, number

__all__ = ["CheckFailed", "Meeting", "accumulated", "activations_kept", "all_axes", "all_gather", "all_gather_rows",
           "all_reduce", "all_to_all_rows", "answer_kept", "answered_together", "applied_at_once", "as_if_in_turn",
           "asked_by_learner", "asked_once", "averaged", "averaged_in_bits", "awaited", "batch_loss", "batches_differ",
           "batches_drawn", "block_count", "broadcast", "bubble_share", "bucket_layout", "bucket_traffic",
           "bus_bandwidth", "by_hand", "calls_into", "chosen_layout", "chunks_in_words", "clipped", "column_outputs",
           "computed", "continued", "counted_bytes", "crossing", "crossing_bytes", "drawn_alike", "dropout_masks",
           "environments", "epochs", "explained", "failure_of_replicas", "fewest", "first_losses", "first_step",
           "first_updates", "found_hidden", "from_stage_to_stage", "gathered_in_place", "global_batches",
           "global_gradient", "global_losses", "gpipe_order", "gradients_cleared", "gradients_dropped",
           "gradients_left", "gradients_of_replicas", "gradients_sharded", "groups_of_axis", "guilty_ranks",
           "handed_out", "held_back", "held_in_time", "held_on_rank", "hierarchical_failure", "in_company",
           "input_of_stage", "is_future", "keeps_dtype", "kept_apart", "laid_alike", "late_push", "left_alone",
           "load_failure", "loaded_state", "lock_given_back", "looked_up", "losses_of_replicas", "losses_of_steps",
           "lost_share", "measured_link", "members", "mesh_failure", "mesh_gradients", "mesh_losses",
           "micro_batch_losses", "moved", "names_of_no_order", "neighbour", "neighbour_exchange", "newest_given",
           "next_action", "next_round_waits", "no_lost_update", "not_moved_yet", "nothing_behind", "nothing_kept",
           "num_sent_bytes", "num_window_steps", "number", "on_grid", "one_f_one_b_order", "one_run_a_step",
           "operator", "optimizer_sharded", "own_pipeline", "parameters_sharded", "parts_on_mesh",
           "parts_without_zeros", "peaks_in_flight", "placements", "places", "point_to_point", "predicted_pipeline",
           "predicted_ratio", "predicted_state", "received_once", "reduce_scatter", "remote_failure",
           "replica_gradients", "resumed", "ring_cost", "ring_traffic", "round_step", "row_outputs", "rows_in_calls",
           "rows_sent", "same_answers", "same_batches", "same_group", "same_losses", "same_outputs", "same_replicas",
           "same_state", "same_weights", "same_weights_on", "sample_mean", "save_failure", "save_interval", "saved",
           "saved_once", "saving_failure", "server_failure", "shapes_in_words", "shard_shapes", "sharded_traffic",
           "sharded_training", "shared_cards", "shares_of_replicas", "split_module", "split_traffic",
           "stage_gradients", "stage_parts", "started_in_backward", "state_put_back", "step_seconds", "summed_metrics",
           "synchronised_once", "torch_failure", "traffic_by_axis", "traffic_slips", "trained_alike", "trained_as_one",
           "training_failure", "uneven_failure", "uneven_gradient", "units_of_blocks", "untouched_in_flight",
           "vocabulary_loss", "vocabulary_traffic", "weights_kept", "went_on", "where_stuck", "whole_checkpoint",
           "window_gradient", "within_groups"]

_report_unwritten_answers()
