"""What `make bench` measures, each part against something else in the same run.

    launch       ranks that all-reduce once: book.launch against torchrun, spawn and accelerate's notebook launcher
    ring         the chapter's ring, written by hand, against gloo's all_reduce, in the same processes
    simulation   building and simulating a ring all-reduce, against the number of ranks
    pages        what the website's pages weigh, and how soon they show something
    player       frames a second of the player at 16 ranks

`python -m benchmarks` runs them all, `python -m benchmarks ring pages` some, `--quick` fewer repeats of less;
`--readme` also keeps what a whole run measured in README.md. A module here is a part, or something that several need:
`report` (tables), `machine` (what it was measured on), `process` (programs timed from outside), `chromium`.
"""
