"""L1: what a job of one's own leaves behind, read without torch and without running any of it.

    flights   what Flight Recorders noted, and which rank the others wait for
    dumps     the files that hold it: torch's, of some or all ranks, and this book's
    profiles  PyTorch profiler traces: computing, communication and how much of it is exposed
    streams   a step of profiler traces, stream by stream, merged to what can be seen
    gpu_memory what CUDA's allocator has given to whom, and at its peak
    arrivals  Arrivals: which rank comes last to the collectives, by one rule; traces' clocks, which these align
    timelines what ranks have noted of their calls and phases, cut where they are released; steps, waiting
    recorded  this book's own traces, as such notes
    spans     stretches of time: what they cover, alone and together
    runs      what `lockstep run --out DIR` leaves: how the run ended, what was said, the notes of its ranks
    told      all that in words; `lockstep show`, in `report`, is the command line of it
"""
