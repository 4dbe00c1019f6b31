"""L3: the twin: what pages without a kernel simulate and plan, once more in JavaScript.

It has what pages use of the package, under Python's names: `ring_all_reduce` in collectives.js is
`book.collectives.ring_all_reduce`. What has no counterpart in Python is in camelCase. Inputs are not checked, as pages
only choose what can be.

    links.js         book.cost.links
    schedule.js      book.schedule
    collectives.js   book.collectives: the all-reduces
    simulate.js      book.simulate: when the moves of a schedule leave and arrive
    pipelines.js     book.pipelines, and when their actions run
    streams.js       book.simulate.streams
    trace.js         book.trace: reads a recording

The planner's rooms are for one layout at a time, where Python has columns of them:

    plan_layouts.js  book.cost.layouts
    plan_bytes.js    book.cost.activations, state and traffic
    plan_ledger.js   book.cost.ledger
    plan_seconds.js  book.cost.seconds
    plan_step.js     book.cost.step
    plan_answer.js   book.cost.search and answer

They draw nothing. Tests run both on the same inputs and compare (tests/test_twin.py, tests/test_plan_explorer.py).
"""
