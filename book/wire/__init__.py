"""L2: ranks that can only send and receive, over a broker that forwards and counts every message.

    frames    messages between a rank and the broker, on a socket
    broker    forwards what ranks send one another, notes who sent how much to whom, finds out when nothing moves
    group     the torch.distributed backend "wire": send, recv and barrier over such a socket, and no collective
    rank      the program of one rank: it runs what a broker's tasks say, for each broker in a new process

A rank in a sandbox has no other way to the others than the broker (but how busy the machine is can be felt by all). So
the broker, which runs where a rank's program can't reach it, knows what was really communicated.
"""
