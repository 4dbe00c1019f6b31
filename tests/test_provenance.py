"""What snapshots of a buffer show, on one rank and without a process group."""
import pytest
import torch

from book.record.snapshots import Watch
from book.record.provenance import read
from book.record.recording import Operation


class Program:
    """Rank 0 of two, whose buffer of one chunk is watched, and which receives into one spare tensor."""

    def __init__(self):
        self.buffer, self.spare, self.operations = torch.tensor([1.0, 0.0]), torch.zeros(2), []
        self.watch = Watch(self.buffer, 1, 2, 1e-7, 0)
        self.position = 0

    def receive(self, *lanes):
        """Receive and wait at once; returns a copy of the message."""
        operation, index = Operation("recv", None, "0", (0, 1), 1, 0, 8.0, start_ns=0, end_ns=1), len(self.operations)
        self.operations.append(operation)
        self.watch.issued(index, operation, [self.spare], self.position)
        self.spare.copy_(torch.tensor(lanes))
        self.watch.waited(index, operation, [self.spare], self.position + 1)
        self.position += 2
        return self.spare.clone()

    def pieces(self):
        """For each receive, what was done with it and what the chunk held afterwards."""
        found, _ = read(self.watch, self.operations, self.position)
        return [(piece.op, piece.contributions) for index in sorted(found) for piece in found[index]]


@pytest.mark.parametrize("num_between, added", [(0, ("reduce", (1, 1))), (1, ("reduce", (1, 1))), (2, (None, None))])
def test_a_copy_is_expected_until_its_memory_has_been_used_twice_more(num_between, added):
    program = Program()
    copy = program.receive(0.0, 1.0)
    for _ in range(num_between):
        program.receive(0.0, 5.0)
    program.buffer += copy
    assert program.pieces()[0] == added
