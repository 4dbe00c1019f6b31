"""Recordings that ranks save and that are merged: the same trace as a launch's, also where hosts' clocks differ."""
import json

import pytest

from book import record
from book.hosts import Hosts, NoHosts
from book.launch import launch
from book.trace import Trace, TraceError

READS = ["tests/programs/record_across_hosts.py"]
SHIFT_S = 1000


def saving(folder, num_messages=2):
    import torch
    import torch.distributed as dist

    dist.init_process_group()
    other = 1 - dist.get_rank()
    for _ in range(num_messages):
        incoming = torch.empty(4)
        requests = [dist.irecv(incoming, other), dist.isend(torch.ones(4), other)]
        for request in requests:
            request.wait()
    record.save(f"{folder}/{dist.get_rank()}.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of two ranks, and the trace of the launch that wrote them."""
    folder = tmp_path_factory.mktemp("saved")
    run = launch(saving, 2, str(folder), record=True)
    return sorted(folder.iterdir()), run.trace


def changed(path, folder, **changes):
    """A copy of a saved file with other values."""
    copy = folder / path.name
    copy.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return copy


@pytest.mark.slow
def test_a_merged_trace_is_that_of_the_launch(saved):
    files, trace = saved
    merged = record.merge(reversed(files))
    assert merged.logical() == trace.logical() and merged.backend == "gloo"
    assert 0 < merged.clock_error_s < 0.1 and Trace.from_json(merged.to_json()).clock_error_s == merged.clock_error_s
    assert trace.clock_error_s is None


@pytest.mark.slow
def test_a_message_that_arrives_before_it_is_sent_is_refused(saved, tmp_path):
    (first, second), _ = saved
    ahead = changed(second, tmp_path, offset_ns=json.loads(second.read_text())["offset_ns"] + SHIFT_S * 10**9)
    with pytest.raises(TraceError, match=r"arrives at rank 0 (999|1000)\.\d+ s before rank 1 sends it: .*record.merge"):
        record.merge([first, ahead])


@pytest.mark.slow
@pytest.mark.parametrize("which, message", [
    ((), "there is no file from rank 0"), ((0,), "there is no file from rank 1"),
    ((0, 0), "from rank 0, and so is another file")])
def test_every_rank_has_one_file(saved, which, message):
    with pytest.raises(TraceError, match=message):
        record.merge([saved[0][number] for number in which])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"format": "else"}, {"recording": None}, {"recording": {"operations": [1]}},
                                     {"emitted": {}}, {"more": 1}])
def test_a_file_that_is_not_a_recording_raises_a_clear_error(saved, tmp_path, changes):
    with pytest.raises(TraceError, match="is not a recording that record.save wrote"):
        record.merge([changed(saved[0][0], tmp_path, **changes), saved[0][1]])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match="0.json can't be read: No such file"):
        record.merge([tmp_path / "0.json"])


@pytest.mark.full
def test_hosts_whose_clocks_differ_are_aligned(tmp_path):
    """Two hosts, a thousand seconds apart, under torchrun alone."""
    try:
        with Hosts(2, 10**9, clock_shift_s=SHIFT_S) as hosts:
            hosts.torchrun(2, ["-m", "tests.programs.record_across_hosts", str(tmp_path)])
    except NoHosts as reason:
        pytest.skip(str(reason))
    files = sorted(tmp_path.iterdir())
    merged = record.merge(files)
    assert merged.world_size == 4 and merged.duration_s < 60 and merged.clock_error_s < 0.01
    assert {event.op for event in merged.of_kind("collective")} == {"all_reduce"}
    offsets = [json.loads(path.read_text())["offset_ns"] / 1e9 for path in files]
    assert offsets == pytest.approx([0, 0, -SHIFT_S, -SHIFT_S], abs=0.01)
    other = tmp_path / "not aligned"
    other.mkdir()
    with pytest.raises(TraceError, match="before rank . sends it: do their hosts' clocks differ"):
        record.merge([changed(path, other, offset_ns=0) for path in files])
