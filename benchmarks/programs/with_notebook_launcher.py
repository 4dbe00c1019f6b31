"""Start ranks with accelerate's `notebook_launcher`, which forks the process that calls it."""
from accelerate import notebook_launcher

from benchmarks.programs.calls import free_port, report
from benchmarks.programs.first_all_reduce import first_all_reduce

if __name__ == "__main__":
    report(lambda world_size: notebook_launcher(first_all_reduce, num_processes=world_size, use_port=str(free_port())))
