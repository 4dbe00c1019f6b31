"""L3: `lockstep run` and `lockstep show`: what a job says of itself in the terminal, and as a page of one file.

    page      the page: sentences, the streams of a step, the picture of the last exchanges, groups and bytes
    drawn     the graph of a hang: who waits for whom
    standing  where the picture of a hang opens; what dumps know of who waits for whom
    shown     what files say, whatever they are
    traces    traces and dumps as what ranks have noted
    __main__  the two commands, of which the parts below do the work: `book.job` runs, `book.look` reads
"""
