"""L3: the twin: schedules, their simulation and closed forms once more, in JavaScript, for pages without a kernel.

Each script is named for the room that it mirrors, and what it hands on has Python's names: `ring_all_reduce` in
collectives.js is `book.collectives.ring_all_reduce`, with the same arguments in the same order; keyword arguments come
last, as an object. What has no counterpart in Python is in camelCase. Errors of schedules have the same words.

    promise.js       book.promise
    schedule.js      book.schedule: Schedule, PipelineSchedule
    trace.js         book.trace
    links.js         book.cost.links
    network.js       book.cost.network
    collectives.js   book.collectives
    pipelines.js     book.pipelines
    messages.js      book.simulate.messages
    shared.js        book.simulate.shared
    simulate.js      book.simulate
    streams.js       book.simulate.streams

The planner's rooms are for one layout at a time, where Python has columns of them:

    plan_layouts.js  book.cost.layouts
    plan_bytes.js    book.cost.activations, state and traffic
    plan_seconds.js  book.cost.seconds
    plan_step.js     book.cost.step
    plan_answer.js   book.cost.search and answer

They are plain scripts, loaded in this order, which put their rooms into `globalThis.lockstepTwin`. They draw nothing
and need nothing else. A test runs both on the same inputs and compares event by event (tests/test_twin.py,
tests/test_plan_twin.py).
"""
