"""Lockstep: schedules, runs, traces and pictures of distributed training.

Data flows one way. A schedule is simulated or run, or a program is recorded: that leaves a trace, and a trace becomes a
picture. What ranks return, or the trace, or both become a verdict.
Each part imports from the layers below its own (L3 may use L2, never the other way round), and within its own layer
without circles.

    L0  words         ranks, lists, counts, verbs, bytes and times as sentences write them
        columns       rows of a dataclass kept as NumPy columns: what schedules and traces are made of
        extras        packages that only some parts need, and the advice where one is missing
        blocks        parts of matrices, and the products that the book cuts
        factors       how much of its buffer a rank sends in a collective
        promise       what a collective starts from and must end in
        schedule      Move, Schedule: who sends which chunk to whom at which step; Action, PipelineSchedule: which
                      forward or backward of which micro-batch a rank runs next
        trace_schema  what each field of a trace's JSON may hold
        trace         Event, Trace: what happened, when, on which rank; parting: where two runs part
        mesh          Mesh: ranks on axes such as (pp, dp, tp), their groups, and the nodes that they sit on
    L1  collectives   ring_all_reduce and its rivals, as schedules; COLLECTIVES: what each promises and costs
        pipelines     gpipe, one_f_one_b and their rivals, as schedules
        cost          latency-bandwidth links and the closed forms they lead to; bytes sent and bytes held; the planner
        faults        how often to save, and runs in which nodes fail: where their time goes
        waiting       ranks that wait for one another: what each does, why, and the message that says so
        look          files that a job leaves: Flight Recorder dumps, profiler traces, memory snapshots; what they say
    L2  tap           every call of a process to torch.distributed, seen once and noted in one log
        audit         what ranks note of a run beside its result, and what that says is wrong although the run ended
        simulate      schedule + link -> trace, without starting a process
        device        which device a rank computes on, and from which its messages come
        launch        launch(fn, world_size): real processes from a notebook cell
        job           a script of your own under torchrun: what its ranks do, seen from outside, and the lines of a run
        doctor        what ranks will stumble on: GPUs, limits, names, networks, other hosts; the speed of all-reduces
        hosts         hosts on one machine, as network namespaces, for torchrun to span
        record        any torch.distributed program -> trace, with whose data is in which chunk
        execute       a schedule moved by real ranks -> trace
        shards        a matrix product that real ranks have cut -> trace, block by block
        wire          ranks that can only send and receive, over a broker that counts what they send
        replay        a recorded backward pass or pipeline with modelled durations: what overlaps, what is idle
        parallel      the small GPT that labs train and split, its text, and what the chapters built to train it
    L3  plot          trace -> matplotlib figure
        twin          schedules, simulate and links once more, in JavaScript, for pages without a kernel
        widgets       trace -> animated player
        report        the commands `lockstep run` and `lockstep show`, and their pages; `job` says the lines of a run,
                      `look` those of files
        checks        verdicts on a learner's run that name the misconception
        legacy        old calls beside today's: both run, and what they said
    L4  grading       labs as assignments: student copies, and submissions graded in a sandbox
        authoring     notebook normaliser and lint, the Sphinx extension, the opening page, terms and search
        __main__      `lockstep`, the one command: each of its words belongs to a part above

The way of one chunk from its schedule to the screen, a room and a name a line:

    collectives.ring_all_reduce      Schedule: its messages are Moves, made when they are first asked for
    launch(execute, …) or simulate   each Move is sent by a real rank, or timed on a link: Events
    record                           what ranks have emitted, put in the order of cause and effect: Trace
    widgets.player_run.read_run      facts: which message brings which chunk, and who holds what after each step
    widgets.player_words             words: phases, what a message does, how the run ends
    widgets.player, widgets.page     JSON and HTML: the facts and words, and a list for readers without scripts
    player.js, chunks.js             the picture at a moment, and "rank 0 sends chunk 0 to rank 1" before the words

Only device, tap, audit, launch, job, doctor, record, execute, shards, wire and parallel import torch: everything else
imports without it.
"""
