"""L3: verdicts on a learner's run; if it is wrong, the verdict names the likely misconception.

A lab imports the modules that it calls, as in `from book.checks import rings`. Three of them say what is wrong:

    attribution   what a tensor is made of: its coefficients, the pattern that they form, and the lab's sentence for it
    formula       what a number must be, and what mistakes make of it, each with its sentence
    verdict       CheckFailed, what raises it, and the comparisons that checks share

and where the recordings of two runs part, `book.trace.parting`. The others have the checks:

    recordings           labs 1, 2, 3, 5, 7: only sends and receives, all waited for, no more sums than needed
    collectives          lab 1: whose data ranks hold after copies, and over which ranks they summed
    data_parallel        lab 2: averaged gradients, the state at the start and at the end, the epochs
    global_batch         lab 2: the first step and the losses of a batch that ranks share out
    gradient_buckets     lab 2: what is in a bucket, and when it was sent
    thread_replicas      lab 2: what threads computed, and what came back to the module
    rings                labs 3, 11: buffers after a ring all-reduce, what it sends and costs
    sharded_steps        lab 4: steps with sharded state: who updates what, with which gradient; checkpoints of it
    sharded_state        lab 4: what ranks hold of sharded state and when, what they send, how they clip
    tensor_parallel      labs 5, 7: a linear map that is cut, modules made of such maps
    tensor_operators     lab 5: the two operators between the cuts
    tensor_model         lab 5: a loss that is cut by vocabulary, dropout masks, what a block holds
    pipeline_parallel    lab 6: what stages hold and send, over a process group and over RPC
    pipeline_replicas    lab 6: replicas of a pipeline: where they start, their shares, the mean of their gradients
    pipeline_orders      lab 6: in which order ranks ran, what they kept, how much they were idle
    meshes               labs 6, 7: coordinates on a mesh, the groups of its axes, what crosses nodes
    hybrid               lab 7: a training step on a mesh: who holds which part, whose gradients
    hybrid_steps         labs 7, 10: what a step was built from, its losses and updates, what it sent; torch's own parts
    resharding           lab 7: which pieces of a cut dimension go from a trainer's ranks to a generator's
    planner              lab 10: what a rank of a layout holds and sends, the seconds of a step
    best_layout          lab 10: the layout to choose
    multi_host           lab 11: variables of ranks on several hosts, a measured link, what crosses, who shares a card
    recovery             lab 12: the guilty rank, what a checkpoint holds and when it is whole, a run that goes on
    quorum_steps         lab 12: steps with the replicas that are there: what counts, what divides it, who is healed
    slow_jobs            lab 13: who is late, which communication nothing hides, MFU, what is wrong with a job
    load_ahead           lab 13: batches that a thread loads ahead, and the errors that come out of it
    frameworks           lab 14: what frameworks hide: accumulation, which rank sees which rows, uneven batches
    parameter_server     lab 15: what a server answers and when, and which pushes its steps are made of
    interleaved          lab 15: two calls at once, interleaved at every possible place
    largest_sent         lab 15: ranks that send the largest numbers of their gradients, and owe the rest
    outer_steps          lab 15: ranks that agree every so many steps: the outer step, and where they go on from
    unwritten            every lab: answers that are not written yet, each reported in a line by the cells that need it

A check compares what ranks hold with what they should hold. Where these differ, `attribution` finds the coefficients of
the contributions that the wrong tensor is made of, and the pattern that they form; a table in the lab's module has a
sentence for each pattern. A number, or anything else that follows from the inputs by a formula, is compared with a
`Formula`: its slips are the wrong formulas, each with its sentence. For what is neither, the sentence stands beside the
condition, in `require` and `refuse`.

Every check raises `CheckFailed` with one sentence that names the likeliest reason. An exercise's last check returns
what the cell prints, which depends on the run's data: a stored "ok" would prove nothing.
"""
