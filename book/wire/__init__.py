"""L2: ranks that can only send and receive, over a broker that forwards and counts every message.

    frames    messages between a rank and the broker, on a socket
    broker    forwards what ranks send one another, records who sent how much to whom, detects when nothing moves
    group     the torch.distributed backend "wire": send, recv and barrier over such a socket, and no collective
    cells     runs a notebook's cells as IPython does
    rank      the program of one rank: it runs what a broker's tasks say, in a new process for each broker

A rank in a sandbox can reach the others only through the broker (though all of them can observe how busy the machine
is). So the broker, which runs where a rank's program can't reach it, knows what was really communicated.
"""
