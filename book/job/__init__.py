"""L2: a job of your own, started by torchrun: what its ranks do is seen from outside, and said when it goes wrong.

    lockstep run --ranks 4 train.py --epochs 3
    torchrun --nproc-per-node 4 -m book.job train.py --epochs 3

Each rank runs the script, which is not changed, and reports to a file of its own in the run's folder. A judge, one
process for each host, reads these files and what the system knows of the ranks: a rank need not answer, it may be dead,
stopped, or hold the interpreter lock.

    command    `lockstep run`: torchrun on this machine, and the judge beside it
    attach     what runs in a rank before its script: the tap starts before the first init_process_group
    watch      the thread of a rank that reports, and what is noted of its calls
    compared   calls, messages and starts that can't be right: noted, and the script goes on
    noted      note: calls and phases of a rank in a ring; what ranks have noted says who is late (`look.timelines`)
    phases     when a program reads data, runs forward and backward, steps its optimizer, and collects garbage
    told       Told: what a rank says of itself, and the folder where it says so
    judge      the process that reads it, and prints what is wrong
    members    a rank as its judge sees it
    deaths     which rank of a host died first, as the system tells it
    rates      tokens per second and MFU, by what the user says of a step; beside the planner's estimate
    across     what the judges of several hosts tell one another, through the store of torchrun's agents
    ending     the sentences on a job that has ended: who failed first, or who was late, what was sent, which replicas
               are equal

Nothing is imported before the script imports it, no signal handler is set, and nothing is left for the end of the
process: all three change what a program does. Only a process that the script forks, such as a loader's worker, answers
SIGUSR1: it tells where it is.
"""
