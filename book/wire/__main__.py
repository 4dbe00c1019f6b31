"""L2: python -m book.wire SOCKET < HEAD runs one rank (see rank)."""
import gc
import sys

if __name__ == "__main__":
    gc.disable()  # nothing that torch's import makes is garbage, and to look through it takes a third of the time
    from book.wire.rank import main

    main(sys.argv[1])
