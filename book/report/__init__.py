"""L3: `lockstep run` and `lockstep show`: what a job says of itself in the terminal, and as a page of one file.

    page      the page: sentences, the picture of the last exchanges, groups and bytes
    __main__  the two commands, of which the parts below do the work: `book.job` runs, `book.look` reads
"""
