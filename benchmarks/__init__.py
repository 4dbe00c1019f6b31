"""What `make bench` measures: each part compares the book with something else in the same run.

    launch       ranks that all-reduce once: book.launch against torchrun, spawn and accelerate's notebook launcher
    ring         the chapter's ring, written by hand, against gloo's all_reduce, in the same processes
    tap          work that the tap sees, against the same work in a group that it does not see
    watched      steps of a job under `lockstep run`, against the same steps under torchrun
    across       all-reduces across hosts that share a card, against the simulator
    simulation   building and simulating a ring all-reduce, against the number of ranks
    planning     estimating every layout of a model, against the number of GPUs
    weights      what players add to the website's pages, in bytes
    pages        how large the website's pages are, and how soon they show something
    player       frames a second of the player at 16 ranks
    grading      one exercise with the sandbox and without it, and submissions an hour
    quorum       one of three replicas killed under torchft, against one of three ranks under torchrun
    late         how often `lockstep run` and `lockstep show` name the late rank of a drawn job

Beside it, `benchmarks.saving` trains while a checkpoint is sent over the same network, for chapter 13, and
`benchmarks.streams` makes the facts that the chapter draws of a profiler trace.

`python -m benchmarks` runs them all, `python -m benchmarks ring pages` some; `--quick` measures less, with fewer
repeats; `--keep` also saves the results in measured.json and writes the book's page of measurements from that, as `make
bench` does. A module here is a part, or something that several need: `report` (tables), `kept` (measured.json and the
page), `machine` (what it was measured on), `process` (programs timed from outside), `chapter` (cells of a notebook),
`chromium`.
"""
