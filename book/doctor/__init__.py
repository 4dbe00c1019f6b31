"""L2: what a machine's ranks will stumble on, each in a sentence with a remedy; `lockstep doctor` asks.

    machine    what the machine has: GPUs, memory that processes share, limits, names, interfaces, variables
    findings   what of it will hurt, and what to do
    bandwidth  all-reduces between ranks of this machine, in the units of nccl-tests
"""
