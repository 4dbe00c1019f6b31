"""What `make gpu` does: try, in one command, everything in this book that needs a machine with GPUs.

    machine      which GPUs there are, and the versions of what drives them
    notebooks    every chapter and every lab's solutions through nbval, each with a time limit
    launching    starting ranks on NCCL against gloo
    ring         the chapter's ring, written by hand, against NCCL's all_reduce
    speed        MFU of the book's GPT on one GPU: the labs' size, and a billion parameters
    overlap      how much of DDP's communication is hidden, by the clock and by the recorder
    traces       the same as PyTorch's profiler sees it, and its files
    sharding     FSDP2's gathers: ahead of a block, and only when it is reached
    memory       what holds a GPU's memory at the peak of a step, from a snapshot of the allocator
    recording    what the recorder costs on streams, and whether its times agree with NCCL and CUDA events
    hanging      a rank that sleeps through a collective: NCCL's timeout, the dumps, and what they tell

`python -m benchmarks.gpu` runs them all and writes _build/gpu/report.md and report.json; `--notebooks`, `--measure`
and `--only labs/03 ring` choose; `--rehearse` runs everything on gloo and the CPU. Other modules: `part` (one part in
a process of its own), `bounded` (a program that ends at a limit, with all that it started), `cells` (what nbval says
about each cell), `ranks` (timing inside ranks), `report`. No part can hang the command, and failures are reported.
"""
