"""Steps of operations that are waited for late, or in another order than they were issued."""
from book import record
from book.record.recording import Operation, Recording


def operation(kind, peer):
    return Operation(kind, None, "0", (0, 1), peer, 0, 8.0, start_ns=0, end_ns=1)


def recording(kind, peer, *log):
    """A rank that issues operations of one kind and waits for them as `log` says: "+0" issues the first, "-0" waits."""
    entries = [({"+": "issue", "-": "wait"}[entry[0]], int(entry[1:])) for entry in log]
    num_operations = sum(what == "issue" for what, _ in entries)
    return Recording([operation(kind, peer) for _ in range(num_operations)], entries)


def steps(*recordings):
    return [(event.rank, event.step) for event in record.assemble(recordings).events if event.kind == "send"]


def test_waiting_for_an_old_message_never_lowers_a_step():
    sender = recording("send", 1, "+0", "+1", "-1", "+2", "-2", "-0", "+3", "-3")
    receiver = recording("recv", 0, "+0", "+1", "+2", "+3", "-0", "-1", "-2", "-3")
    assert steps(sender, receiver) == [(0, 0), (0, 0), (0, 1), (0, 2)]


def test_what_is_issued_before_a_wait_may_be_in_the_same_step():
    sender = recording("send", 1, "+0", "+1", "+2", "-2", "-1", "-0", "+3", "-3")
    receiver = recording("recv", 0, "+0", "+1", "+2", "+3", "-3", "-2", "-1", "-0")
    assert steps(sender, receiver) == [(0, 0), (0, 0), (0, 0), (0, 1)]
