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
    remote        pipelines over RPC, and replicas of pipelines: what was sent, who learned what

Every check raises `CheckFailed` with one sentence, or returns what the cell prints, which depends on the run's data: a
stored "ok" would prove nothing. (`weights_kept` and `awaited` return nothing; another check of the same run does.)
"""
from book.checks.buckets import awaited, bucket_layout, bucket_traffic, num_sent_bytes
from book.checks.buffers import all_gather, all_reduce, contributions, neighbour_exchange, reduce_scatter
from book.checks.copies import all_gather_rows, all_to_all_rows, broadcast, received_once, rows_sent
from book.checks.dropout import dropout_masks
from book.checks.gradients import accumulated, averaged, averaged_in_bits, weights_kept
from book.checks.groups import names_of_no_order, on_grid, sample_mean, summed_metrics
from book.checks.orders import (
    activations_kept, bubble_share, gpipe_order, one_f_one_b_order, peaks_in_flight, predicted_pipeline, where_stuck,
)
from book.checks.pipeline import (
    batch_loss, micro_batch_losses, nothing_kept, same_outputs, stage_gradients, stage_parts,
)
from book.checks.remote import (
    first_updates, from_stage_to_stage, groups_by_all, hybrid_failure, hybrid_gradients, hybrid_losses, in_company,
    losses_of_steps, remote_failure, rows_in_calls, same_replicas, same_weights, shares_of_replicas,
)
from book.checks.replicas import Meeting, replica_gradients
from book.checks.split_module import block_count, shard_shapes, split_module, split_traffic
from book.checks.tensor import column_outputs, computed, operator, row_outputs, shapes_in_words
from book.checks.traffic import bus_bandwidth, point_to_point, ring_cost, ring_traffic
from book.checks.training import epochs, first_step, global_losses, same_state, trained_alike
from book.checks.verdict import CheckFailed, number
from book.checks.vocabulary import vocabulary_loss, vocabulary_traffic

__all__ = ["CheckFailed", "Meeting", "accumulated", "activations_kept", "all_gather", "all_gather_rows", "all_reduce",
           "all_to_all_rows", "averaged", "averaged_in_bits", "awaited", "batch_loss", "block_count", "broadcast",
           "bubble_share", "bucket_layout", "bucket_traffic", "bus_bandwidth", "column_outputs", "computed",
           "contributions", "dropout_masks", "epochs", "first_step", "first_updates", "from_stage_to_stage",
           "global_losses", "gpipe_order", "groups_by_all", "hybrid_failure", "hybrid_gradients", "hybrid_losses",
           "in_company", "losses_of_steps", "micro_batch_losses", "names_of_no_order", "neighbour_exchange",
           "nothing_kept", "num_sent_bytes", "number", "on_grid", "one_f_one_b_order", "operator", "peaks_in_flight",
           "point_to_point", "predicted_pipeline", "received_once", "reduce_scatter", "remote_failure",
           "replica_gradients", "ring_cost", "ring_traffic", "row_outputs", "rows_in_calls", "rows_sent",
           "same_outputs", "same_replicas", "same_state", "same_weights", "sample_mean", "shapes_in_words",
           "shard_shapes", "shares_of_replicas", "split_module", "split_traffic", "stage_gradients", "stage_parts",
           "summed_metrics", "trained_alike", "vocabulary_loss", "vocabulary_traffic", "weights_kept", "where_stuck"]
