"""L2: what a machine's ranks will stumble on, each in a sentence with a remedy; `lockstep doctor` asks.

    machine    what the machine has: GPUs, memory that processes share, limits, names, interfaces, variables
    findings   what of it will hurt, and what to do
    cards      what NVML says of GPUs, and what joins which of them
    ailments   what of that will hurt, and what to do
    across     the hosts of a job compared: versions, clocks, who reaches whom
    bandwidth  all-reduces between ranks of this machine, in the units of nccl-tests
"""
