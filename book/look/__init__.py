"""L1: what a job of one's own leaves behind, read without torch and without running any of it.

    flights   what Flight Recorders noted, and which rank the others wait for
    dumps     the files that hold it: torch's, of some or all ranks, and this book's
    profiles  PyTorch profiler traces: computing, communication and how much of it nothing hides
    arrivals  which rank comes last to the collectives, on clocks that these align
    told      all that in words; `lockstep show` is the command line of it
"""
