"""L1: ranks that wait for one another: what each does, as facts; why they wait, and the message that says so.

    doing      Kind, Doing: what a thread is doing, and the words for it
    hang       Standing, Hang: what is known of each rank of a run that hangs; who waits for whom
    history    how often each line of a rank has made a call, and in which order
    causes     CAUSES: the sentences that say why, one function each
    counts     those that count: which rank has called a line more often than another, and since when
    message    what a reader gets to see of all that
    standstill the same for a picture: who waits for whom, and what all had done before

Who finds the facts is in the rooms above: `launch` asks its own ranks, `record.flight` reads what ranks have dumped.
Facts are matched by kind and fields; their words are made once, at the end, and nobody reads them back. To change the
words of a hang, see `doing`, `causes` or `message`; to add a cause, see `causes`.
"""
