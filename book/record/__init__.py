"""L2: record what a torch.distributed program does, C++ callers included, and whose data its messages carry.

    recording       what one rank's recorder keeps, as plain data
    recorder        start, watch, lanes, emit, collect: what runs in a rank
    backward        follow_backward: which gradient was ready when, and which bucket took it
    phases          phase: which phase of a training step a rank was in
    stages          stage_action, follow_stages: which forward or backward of which micro-batch a rank ran
    memory          held_state, follow_units: how much of each part of a model a rank holds, and which part it works on
    buckets         whose gradients an all-reduce carries in a reader's own wrapper
    clock           times on a GPU's clock, converted to the program's
    snapshots       snapshots of the watched buffer around each operation
    provenance      what the snapshots show: which chunk, added or replaced, whose contributions
    watcher         what a rank's program does with the blocks of given matrices, operation by operation
    known_blocks    which block of which matrix a tensor holds, recognized by its values
    scores          which of attention's scores a rank works on
    tokens          which expert works on which token, and what comes back
    activations     the bytes that a forward keeps for backward: those of autograd, or all
    happens_before  operations of all ranks matched and sorted into steps: assemble, from_zero
    files           files of which every rank writes one, read with none missing
    saved           recordings of ranks on several hosts, saved and merged with their clocks aligned: save, merge
    flight          torch's Flight Recorder: dump it while ranks hang, read the dumps, find the guilty rank
"""
from book.extras import needed_by

with needed_by("book.record", "torch"):
    from book.record.backward import follow_backward
    from book.record.happens_before import assemble, from_zero
    from book.record.memory import follow_units, held_state, holds, storage_bytes, unit_action, unit_done
    from book.record.phases import phase
    from book.record.recorder import collect, emit, lanes, paused, start, watch
    from book.record.saved import merge, save
    from book.record.snapshots import WatchError
    from book.record.stages import action_done, follow_stages, stage_action

__all__ = ["WatchError", "action_done", "assemble", "collect", "emit", "follow_backward", "follow_stages",
           "follow_units", "from_zero", "held_state", "holds", "lanes", "merge", "paused", "phase", "save",
           "stage_action", "start", "storage_bytes", "unit_action", "unit_done", "watch"]
