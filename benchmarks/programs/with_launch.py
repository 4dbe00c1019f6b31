"""Start ranks with `book.launch`."""
from benchmarks.programs.calls import report
from benchmarks.programs.first_all_reduce import first_all_reduce
from book.launch import launch

if __name__ == "__main__":
    report(lambda world_size: launch(first_all_reduce, world_size))
