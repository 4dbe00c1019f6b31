"""L3: verdicts on a learner's run; a wrong one is told which misconception it looks like.

    verdict     CheckFailed, and the check of a single number
    buffers     what the ranks' buffers hold after a collective
    traffic     what a run sent
    copies      whose data ranks hold after a broadcast, an all-gather, an all-to-all
    groups      sums over rows and columns of ranks, in disorder, and where a rank has nothing to add
    replicas    what threads computed, and what came back to the module
    gradients   whether ranks hold the mean of their gradients
    buckets     what is in a bucket, and when it was sent
    training    the state that ranks start from, the global batch, the epochs
    orders      in which order the ranks of a pipeline ran, what they kept, how much they were idle
    remote      pipelines over RPC, and replicas of pipelines: what was sent, who learned what
    pipeline    what the stages of a pipeline hold: parameters, gradients, losses

Every check raises `CheckFailed` with one sentence, or returns what the cell prints, which depends on the run's data: a
stored "ok" would prove nothing. (`weights_kept` and `awaited` return nothing; another check of the same run does.)
"""
from book.checks.buckets import awaited, bucket_layout, bucket_traffic, num_sent_bytes
from book.checks.buffers import all_gather, all_reduce, contributions, neighbour_exchange, reduce_scatter
from book.checks.copies import all_gather_rows, all_to_all_rows, broadcast, received_once, rows_sent
from book.checks.gradients import accumulated, averaged, averaged_in_bits, weights_kept
from book.checks.groups import names_of_no_order, on_grid, sample_mean, summed_metrics
from book.checks.orders import (
    activations_kept, bubble_share, gpipe_order, one_f_one_b_order, peaks_in_flight, predicted_pipeline, where_stuck,
)
from book.checks.pipeline import batch_loss, micro_batch_losses, same_outputs, stage_gradients, stage_parts
from book.checks.remote import (
    first_updates, hybrid_gradients, hybrid_losses, in_company, losses_of_steps, rows_in_calls, same_replicas,
    same_weights,
)
from book.checks.replicas import Meeting, replica_gradients
from book.checks.traffic import bus_bandwidth, point_to_point, ring_cost, ring_traffic
from book.checks.training import epochs, first_step, global_losses, same_state, trained_alike
from book.checks.verdict import CheckFailed, number

__all__ = ["CheckFailed", "Meeting", "accumulated", "activations_kept", "all_gather", "all_gather_rows", "all_reduce",
           "all_to_all_rows", "averaged", "averaged_in_bits", "awaited", "batch_loss", "broadcast", "bubble_share",
           "bucket_layout", "bucket_traffic", "bus_bandwidth", "contributions", "epochs", "first_step", "first_updates",
           "global_losses", "gpipe_order", "hybrid_gradients", "hybrid_losses", "in_company", "losses_of_steps",
           "micro_batch_losses", "names_of_no_order", "neighbour_exchange", "num_sent_bytes", "number", "on_grid",
           "one_f_one_b_order", "peaks_in_flight", "point_to_point", "predicted_pipeline", "received_once",
           "reduce_scatter", "replica_gradients", "ring_cost", "ring_traffic", "rows_in_calls", "rows_sent",
           "same_outputs", "same_replicas", "same_state", "same_weights", "sample_mean", "stage_gradients",
           "stage_parts", "summed_metrics", "trained_alike", "weights_kept", "where_stuck"]
