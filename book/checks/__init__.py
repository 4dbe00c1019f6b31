"""L3: verdicts on a learner's run; a wrong one is told which misconception it looks like.

    verdict       CheckFailed, and the check of a single number
    compare       comparisons that checks share: arrays, dicts of them, what ranks hold, sums taken apart
    buffers       what the ranks' buffers hold after a collective
    traffic       what a run sent
    copies        whose data ranks hold after a broadcast, an all-gather, an all-to-all
    groups        sums over rows and columns of ranks, in disorder, and where a rank has nothing to add
    replicas      what threads computed, and what came back to the module
    gradients     whether ranks hold the mean of their gradients
    buckets       what is in a bucket, and when it was sent
    training      the state that ranks start from, the global batch, the epochs
    tensor        a linear map cut by columns or rows, and the operators between the cuts
    split_module  a module split over ranks: its parts, output, gradients, traffic
    vocabulary    a cross-entropy whose logits are cut by vocabulary
    dropout       masks that ranks draw alike, and masks of their own
    orders        in which order the ranks of a pipeline ran, what they kept, how much they were idle
    pipeline      what the stages of a pipeline hold: parameters, gradients, losses
    sharded       steps with sharded state: who updates which numbers, with which gradient
    sharded_state       what ranks hold of sharded state and when, what they send, how they clip
    sharded_checkpoint  checkpoints that are saved once and loaded on other ranks
    remote        pipelines over RPC, and replicas of pipelines: what was sent, who learned what
    mesh          coordinates on a mesh, the groups of its axes, what crosses nodes
    hybrid        a training step on a mesh: who holds which part, whose gradients
    hybrid_steps  what it was built from, its losses, its updates, what it sent
    hybrid_torch  torch's own parts on a mesh: placements, checkpoints

Every check raises `CheckFailed` with one sentence. An exercise's last check returns what the cell prints, which depends
on the run's data: a stored "ok" would prove nothing. Checks that return nothing stand beside one that does.
"""
from book.checks.buckets import awaited, bucket_layout, bucket_traffic, num_sent_bytes
from book.checks.buffers import all_gather, all_reduce, contributions, neighbour_exchange, reduce_scatter
from book.checks.copies import all_gather_rows, all_to_all_rows, broadcast, received_once, rows_sent
from book.checks.dropout import dropout_masks
from book.checks.gradients import accumulated, averaged, averaged_in_bits, weights_kept
from book.checks.groups import names_of_no_order, on_grid, sample_mean, summed_metrics
from book.checks.hybrid import drawn_alike, mesh_failure, mesh_gradients, parts_on_mesh
from book.checks.hybrid_steps import by_hand, calls_into, first_losses, mesh_losses, moved, traffic_by_axis
from book.checks.hybrid_torch import placements, resumed, saved, torch_failure
from book.checks.mesh import (
    all_axes, crossing, groups_of_axis, members, own_pipeline, places, same_group, within_groups,
)
from book.checks.orders import (
    activations_kept, bubble_share, gpipe_order, one_f_one_b_order, peaks_in_flight, predicted_pipeline, where_stuck,
)
from book.checks.pipeline import (
    batch_loss, micro_batch_losses, nothing_kept, same_outputs, stage_gradients, stage_parts,
)
from book.checks.remote import (
    failure_of_replicas, first_updates, from_stage_to_stage, gradients_of_replicas, groups_by_all, in_company,
    losses_of_replicas, losses_of_steps, remote_failure, rows_in_calls, same_replicas, same_weights,
    shares_of_replicas,
)
from book.checks.replicas import Meeting, replica_gradients
from book.checks.sharded import sharded_training, training_hint
from book.checks.sharded_checkpoint import continued, load_failure, parts_without_zeros, saved_once
from book.checks.sharded_state import (
    clipped, counted_bytes, fewest, gradients_dropped, gradients_sharded, held_in_time, nothing_behind,
    optimizer_sharded, parameters_sharded, predicted_state, sharded_traffic,
)
from book.checks.split_module import block_count, shard_shapes, split_module, split_traffic
from book.checks.tensor import column_outputs, computed, operator, row_outputs, shapes_in_words
from book.checks.traffic import bus_bandwidth, point_to_point, ring_cost, ring_traffic
from book.checks.training import epochs, first_step, global_losses, same_state, trained_alike
from book.checks.verdict import CheckFailed, number
from book.checks.vocabulary import vocabulary_loss, vocabulary_traffic

__all__ = ["CheckFailed", "Meeting", "accumulated", "activations_kept", "all_axes", "all_gather", "all_gather_rows",
           "all_reduce", "all_to_all_rows", "averaged", "averaged_in_bits", "awaited", "batch_loss", "block_count",
           "broadcast", "bubble_share", "bucket_layout", "bucket_traffic", "bus_bandwidth", "by_hand", "calls_into",
           "clipped", "column_outputs", "computed", "continued", "contributions", "counted_bytes", "crossing",
           "drawn_alike", "dropout_masks", "epochs", "failure_of_replicas", "fewest", "first_losses", "first_step",
           "first_updates", "from_stage_to_stage", "global_losses", "gpipe_order", "gradients_dropped",
           "gradients_of_replicas", "gradients_sharded", "groups_by_all", "groups_of_axis", "held_in_time",
           "in_company", "load_failure", "losses_of_replicas", "losses_of_steps", "members", "mesh_failure",
           "mesh_gradients", "mesh_losses", "micro_batch_losses", "moved", "names_of_no_order", "neighbour_exchange",
           "nothing_behind", "nothing_kept", "num_sent_bytes", "number", "on_grid", "one_f_one_b_order", "operator",
           "optimizer_sharded", "own_pipeline", "parameters_sharded", "parts_on_mesh", "parts_without_zeros",
           "peaks_in_flight", "placements", "places", "point_to_point", "predicted_pipeline", "predicted_state",
           "received_once", "reduce_scatter", "remote_failure", "replica_gradients", "resumed", "ring_cost",
           "ring_traffic", "row_outputs", "rows_in_calls", "rows_sent", "same_group", "same_outputs", "same_replicas",
           "same_state", "same_weights", "sample_mean", "saved", "saved_once", "shapes_in_words", "shard_shapes",
           "sharded_traffic", "sharded_training", "shares_of_replicas", "split_module", "split_traffic",
           "stage_gradients", "stage_parts", "summed_metrics", "torch_failure", "traffic_by_axis", "trained_alike",
           "training_hint", "vocabulary_loss", "vocabulary_traffic", "weights_kept", "where_stuck", "within_groups"]
