"""L2: record what a torch.distributed program does, C++ callers included, and whose data its messages carry.

    recording       what one rank's recorder keeps, as plain data
    recorder        start, watch, lanes, emit, collect: what runs in a rank
    backward        follow_backward: which gradient was ready when, and which bucket took it
    stages          stage_action, follow_stages: which forward or backward of which micro-batch a rank ran
    memory          held_state, follow_units: what a rank really holds of a model's parts, and works on
    buckets         whose gradients an all-reduce carries, in a module of the reader's own
    clock           moments on a GPU's clock, brought to the program's
    group           the process group that notes every operation and lets it pass
    looks           looks at the watched buffer around each operation
    provenance      what the looks tell: which chunk, added or replaced, whose contributions
    watcher         what a rank's program does with the blocks of some matrices, operation by operation
    atlas           which block of which matrix a tensor holds, read off its numbers
    activations     the bytes that autograd keeps for backward
    happens_before  operations of all ranks matched and put in steps: assemble, from_zero
"""
from book.record.backward import follow_backward
from book.record.happens_before import assemble, from_zero
from book.record.looks import WatchError
from book.record.memory import follow_units, held_state, holds, storage_bytes, unit_action, unit_done
from book.record.recorder import collect, emit, lanes, paused, start, watch
from book.record.stages import action_done, follow_stages, stage_action

__all__ = ["WatchError", "action_done", "assemble", "collect", "emit", "follow_backward", "follow_stages",
           "follow_units", "from_zero", "held_state", "holds", "lanes", "paused", "stage_action", "start",
           "storage_bytes", "unit_action", "unit_done", "watch"]
