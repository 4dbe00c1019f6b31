"""L3: traces as animated players: `play` one, `race` several on one clock, `panel` to rerun one by hand.

    play(trace)                                  a trace or a schedule
    play(run.trace)                              of collectives alone: over time, who waits in which (called)
    play({4: trace, 8: trace})                   several, to choose from; keys may be tuples: {(4, "even"): ...}
    race({"ring": trace, "tree": trace})         modelled traces side by side
    panel(run, num_ranks=(2, 4, 8))              controls, a button, and the player of what run(...) returns
    bucket_timeline(trace, replay)               a backward pass: gradients, buckets and their all-reduces on one clock
    step_timeline(trace)                         training steps: phases, all-reduces, and who waits for whom
    pipeline_player(schedule_or_trace)           a pipeline: forwards, backwards, what is kept, what is idle
    pipeline_race({"GPipe": a, "1F1B": b})       several pipelines on one clock
    pipeline_game(num_stages=4)                  the reader places forwards and backwards by hand
    sharded_product(trace)                       a matrix product cut over ranks: who holds which block, what moves
    attention_player(trace)                      attention over a cut sequence: keys and values that travel, scores
    expert_player(trace)                         experts on several ranks: what tokens want, queues, what is dropped
    memory_player(trace)                         sharded state: what each rank holds of each unit, what is gathered
    memory_bars()                                the same by formula: model, ranks, stage and precision to choose
    mesh_explorer(trace, mesh)                   ranks on their nodes, the groups of each, a step that is played on them
    race_explorer()                              all-reduces on links that the reader chooses, simulated in the page
    server_explorer()                            parameter servers on these links, simulated in the page
    axes_explorer()                              bytes across nodes by the order of a mesh's axes
    pipeline_explorer()                          a pipeline's step, bubble and memory, simulated in the page
    plan_explorer()                              the planner's answer for what the reader chooses, computed in the page
    bucket_explorer(gradient_bytes)              a backward pass and its buckets, simulated in the page
    sharding_explorer()                          a step with sharded state, its time and memory, simulated in the page
    load_explorer()                              experts of unequal popularity: who waits, what is dropped
    ledger(chapter)                              the story so far: held, sent and waited for, and a line of one's own
    Calls(timelines)                             a job's last exchanges: phases of each rank, waiting, exchanges
    step_streams(streams_of(...))                a step of profiler traces: what each stream of each rank ran
    layout_chart(search(...))                    all layouts of a model on a cluster, memory against time

Each returns an object that displays itself: in a live notebook as a widget with the traits `step`, `playing`, `payload`
and `error` (and `player.trace = other`), on a static page as HTML that deferred scripts bring to life. The same program
always gives the same HTML: it holds logical steps and modelled times, never a measured time, but in the pictures of
calls, which are about those. `save("player.html")` writes it, with its scripts and styles, as one file, which any
browser shows without a network.

    registry        all widgets, and which script draws each; scripts import what they need
    page, live      what all widgets share: a page with data and words; an anywidget around it, if there is one (show)
    terms           how their texts write names from code, where a trace comes from, and shares
    scene.js        what all scripts and all data share; widgets.css has the styles of all widgets

Beside the mesh explorer they are of three families:

    holdings        who holds what, stop by stop: the player, the ring and the race by hand (chunks.js); shards,
                    attention, experts, memory
    lanes           blocks over time (lanes.js): timeline, steps, calls (also of streams), pipeline, game
    dials           numbers that follow what the reader chooses: explorers (explorer.js), memory_bars, layouts

What memory, shards, attention, experts, timeline and pipeline draw and tell is played by `mountScene` (scene.js); what
explorers answer is drawn beside the dials of `explorer` (explorer.js). The data of a page are JSON, which its script
only reads.

A widget's module is named for it: it has its Page, its function, and the data that is drawn. What reads a trace for it
is in `*_run`, long texts are in `*_words`. Its script lies next to it.
"""
from __future__ import annotations

from book.widgets.attention import attention_player
from book.widgets.experts import expert_player
from book.widgets.game import pipeline_game
from book.widgets.layouts import layout_chart
from book.widgets.ledger import ledger
from book.widgets.memory import memory_player
from book.widgets.memory_bars import memory_bars
from book.widgets.mesh import mesh_explorer
from book.widgets.pipeline import pipeline_player, pipeline_race
from book.widgets.plan_explorer import plan_explorer
from book.widgets.player import panel, play, race
from book.widgets.shards import sharded_product
from book.widgets.step_explorers import bucket_explorer, load_explorer, pipeline_explorer, sharding_explorer
from book.widgets.steps import step_timeline
from book.widgets.streams import step_streams
from book.widgets.timeline import bucket_timeline
from book.widgets.traffic_explorers import axes_explorer, race_explorer, server_explorer

__all__ = ["attention_player", "axes_explorer", "bucket_explorer", "bucket_timeline", "expert_player", "layout_chart",
           "ledger", "load_explorer", "memory_bars", "memory_player", "mesh_explorer", "panel", "pipeline_explorer",
           "pipeline_game", "pipeline_player", "pipeline_race", "plan_explorer", "play", "race", "race_explorer",
           "server_explorer", "sharded_product", "sharding_explorer", "step_streams",
           "step_timeline"]
