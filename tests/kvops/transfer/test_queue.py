"""The queue on a device that stands still unless stepped."""

import logging

import numpy as np
import pytest
import torch

from kvferry.kvops.transfer.queue import Copy, TransferQueue
from kvferry.kvops.transfer.states import State

CHUNK = 3
BIG = 1 << 30


@pytest.fixture
def frames(layout, new_frames):
    return new_frames(layout.part_bytes, 40)


@pytest.fixture
def device(new_device):
    return new_device()


@pytest.fixture
def queue(layout, frames, device):
    queue = TransferQueue([layout], frames, device, max_inflight_bytes=BIG)
    yield queue
    queue.close()


def chunk(at, header=None, first=0):
    blocks = list(range(at * CHUNK, at * CHUNK + CHUNK - first))
    return Copy(0, first, blocks, at if header is None else header, 1)


def states(queue, job_id):
    return [t.state for t in queue._ledger._jobs[job_id].transfers]


def step_until(device, queue, job_id, state):
    while states(queue, job_id)[0] is not state:
        assert device.step()


def test_a_store_and_a_load_carry_the_bytes(queue, layout, frames, device, blob_of):
    expected = [blob_of(layout, chunk(at).block_ids) for at in range(3)]
    queue.submit_store(7, [chunk(0), chunk(1), chunk(2)])
    assert queue.poll() == []
    assert queue.inflight_bytes == 9 * layout.block_bytes
    device.drain()
    [stored] = queue.poll()
    assert (stored.job_id, stored.is_load, stored.failed) == (7, False, [])
    assert stored.bytes == 9 * layout.block_bytes
    assert stored.seconds >= stored.queue_seconds >= 0
    for at in range(3):
        assert torch.equal(frames.part(at)[: len(expected[at])], expected[at])
        assert (frames.part(at)[len(expected[at]) :] == 0xA5).all()

    queue.submit_load(8, [chunk(10, header=2), chunk(11, header=0)])
    device.drain()
    [loaded] = queue.poll()
    assert (loaded.job_id, loaded.is_load, loaded.failed) == (8, True, [])
    assert torch.equal(blob_of(layout, chunk(10).block_ids), expected[2])
    assert torch.equal(blob_of(layout, chunk(11).block_ids), expected[0])
    assert queue.counters.stored_chunks == 3
    assert queue.counters.loaded_bytes == loaded.bytes
    assert queue.inflight_bytes == 0


def test_a_partial_load_leaves_the_other_blocks(queue, layout, device, blob_of):
    queue.submit_store(1, [chunk(0)])
    device.drain()
    before = [t.clone() for t in layout.tensors]
    queue.submit_load(2, [Copy(0, 2, [50], 0, 1)])
    device.drain()
    for tensor, old in zip(layout.tensors, before, strict=True):
        old[50] = old[2]
        assert torch.equal(tensor, old)


def test_groups_use_their_own_layouts(new_layout, new_frames, device, blob_of):
    layouts = [new_layout(seed=1), new_layout(seed=2)]
    frames = new_frames(layouts[0].part_bytes, 4)
    queue = TransferQueue(layouts, frames, device, max_inflight_bytes=BIG)
    expected = [blob_of(layouts[g], ids) for g, ids in ((1, [4, 5, 6]), (0, [1, 2, 3]))]
    queue.submit_store(1, [Copy(1, 0, [4, 5, 6], 0, 1), Copy(0, 0, [1, 2, 3], 1, 1)])
    device.drain()
    for header in (0, 1):
        assert torch.equal(frames.part(header)[: len(expected[0])], expected[header])


def test_the_callers_block_ids_may_change_after_submission(queue, layout, frames, device, blob_of):
    ids = np.array([3, 4, 5])
    expected = blob_of(layout, [3, 4, 5])
    queue.submit_store(1, [Copy(0, 0, ids, 0, 1)])
    ids[:] = 9
    device.drain()
    assert torch.equal(frames.part(0)[: len(expected)], expected)


def test_an_empty_job_ends_at_once(queue):
    queue.submit_load(3, [])
    [ended] = queue.poll()
    assert (ended.job_id, ended.bytes, ended.failed) == (3, 0, [])


def test_loads_overtake_stores_and_each_is_first_in_first_out(queue, frames, device):
    order = []
    frames.faults["begin_write"] = lambda header: order.append(("store", header))
    frames.faults["begin_read"] = lambda header: order.append(("load", header))
    queue.submit_store(1, [chunk(0), chunk(1)])
    queue.submit_store(2, [chunk(2)])
    queue.submit_load(3, [chunk(3)])
    queue.submit_load(4, [chunk(4)])
    device.drain()
    assert order == [("load", 3), ("load", 4), ("store", 0), ("store", 1), ("store", 2)]


def test_a_copy_without_a_frame_fails_alone_and_no_frame_is_asked(queue, frames, device):
    queue.submit_load(1, [chunk(0, header=-1), chunk(1)])
    device.drain()
    [ended] = queue.poll()
    assert ended.failed == [0]
    assert {header for _, header in frames.calls} == {1}


# --- refusal ------------------------------------------------------------------------------------


def test_a_store_over_the_bound_is_refused_whole(layout, frames, device):
    bound = 2 * CHUNK * layout.block_bytes
    queue = TransferQueue([layout], frames, device, max_inflight_bytes=bound)
    queue.submit_store(1, [chunk(0)])
    queue.submit_store(2, [chunk(1), chunk(2)])
    [refused] = queue.poll()
    assert (refused.job_id, refused.failed, refused.bytes) == (2, [0, 1], 0)
    assert frames.state[:3] == ["empty", "failed", "failed"]
    assert queue.counters.skipped_stores == 2
    assert queue.inflight_bytes == CHUNK * layout.block_bytes
    queue.submit_store(3, [chunk(3)])
    device.drain()
    assert [ended.failed for ended in queue.poll()] == [[], []]
    queue.submit_store(4, [chunk(4), chunk(5)])
    device.drain()
    assert [ended.failed for ended in queue.poll()] == [[]]


def test_loads_are_not_bounded_since_their_pages_and_frames_exist(layout, frames, device):
    queue = TransferQueue([layout], frames, device, max_inflight_bytes=1)
    queue.submit_load(1, [chunk(0), chunk(1)])
    device.drain()
    assert queue.poll()[0].failed == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Copy(0, 0, [60], 0, 1), r"block ids must be in 0\.\.59; got 60"),
        (Copy(0, 0, [-1], 0, 1), r"block ids must be in 0\.\.59; got -1"),
        (Copy(0, 1, [1, 2, 3], 0, 1), "got 3 blocks from place 1"),
        (Copy(0, -1, [1], 0, 1), "from place -1"),
        (Copy(1, 0, [1], 0, 1), r"group must be in 0\.\.0; got 1"),
        (Copy(-1, 0, [1], 0, 1), "group must be"),
        (Copy(0, 0, [1.5], 0, 1), "must be integers"),
    ],
)
@pytest.mark.parametrize("verb", ["submit_store", "submit_load"])
def test_a_bad_copy_refuses_the_job_before_a_byte_moves(
    verb, bad, message, queue, layout, frames, device
):
    before = [t.clone() for t in layout.tensors]
    with pytest.raises(ValueError, match=message):
        getattr(queue, verb)(1, [chunk(5), bad, chunk(6)])
    device.drain()
    assert queue.poll() == []
    assert not frames.calls
    assert (frames.memory == 0xA5).all()
    torch.testing.assert_close(list(layout.tensors), before, rtol=0, atol=0)
    queue.submit_store(1, [chunk(5)])  # the number is still free


def test_a_number_in_use_is_refused(queue, frames, device):
    queue.submit_store(1, [chunk(0)])
    with pytest.raises(ValueError, match="job 1 is under way"):
        queue.submit_load(1, [chunk(1)])
    device.drain()
    assert len(queue.poll()) == 1


def test_a_bound_of_nothing_is_refused(layout, frames, device):
    with pytest.raises(ValueError, match="at least 1; got 0"):
        TransferQueue([layout], frames, device, max_inflight_bytes=0)


# --- wait ---------------------------------------------------------------------------------------


def test_wait_cancels_what_was_not_read_and_returns_before_the_checksum(queue, frames, device):
    queue.submit_store(1, [chunk(0), chunk(1)])
    queue.submit_store(2, [chunk(2)])
    step_until(device, queue, 1, State.MOVING)
    queue.wait([1, 99], 60)
    assert frames.calls["finish_write", 0] == 0
    assert frames.state[1] == "failed"
    assert frames.calls["begin_write", 1] == 0
    device.drain()
    results = {ended.job_id: ended.failed for ended in queue.poll()}
    assert results == {1: [1], 2: []}
    assert frames.state[:3] == ["ready", "failed", "ready"]
    assert queue.counters.cancelled_stores == 1


def test_wait_cancels_a_store_that_is_just_about_to_read(queue, frames, device):
    def wait_meanwhile(header):
        frames.faults.clear()
        queue.wait([1], 60)

    frames.faults["begin_write"] = wait_meanwhile
    device.touched = lambda is_load, block: pytest.fail("read after the wait")
    queue.submit_store(1, [chunk(0)])
    device.drain()
    assert queue.poll()[0].failed == [0]
    assert frames.calls["fail_write", 0] == 1


def test_wait_for_a_load_returns_with_its_result(queue, device):
    queue.submit_load(1, [chunk(0), chunk(1)])
    queue.submit_load(2, [chunk(2)])
    queue.wait({1}, 60)
    assert 1 in [ended.job_id for ended in queue.poll()]


def test_at_the_deadline_stores_are_given_up(layout, frames, new_device, caplog):
    device = new_device(patience=0)
    queue = TransferQueue([layout], frames, device, max_inflight_bytes=BIG)
    queue.submit_store(5, [chunk(0), chunk(1)])
    step_until(device, queue, 5, State.MOVING)
    queue.wait([5], 0.25)
    assert states(queue, 5)[0] is State.ABANDONED
    assert "waited 0.2 s for the pages of jobs [5]" in caplog.text
    device.drain()
    assert queue.poll()[0].failed == [0, 1]
    assert frames.state[:2] == ["failed", "failed"]


def test_at_the_deadline_only_loads_that_write_are_waited_for(layout, frames, new_device, caplog):
    device = new_device(patience=1)
    queue = TransferQueue([layout], frames, device, max_inflight_bytes=BIG)
    queue.submit_load(5, [chunk(0), chunk(1)])
    step_until(device, queue, 5, State.MOVING)
    queue.wait([5], 0)
    [ended] = queue.poll()
    assert ended.failed == [1]
    assert frames.state[1] == "empty", "a load that never began says nothing about its frame"
    assert caplog.text.count("for the pages of jobs [5]") > 1
    assert queue.counters.cancelled_loads == 1


def test_flush_says_whether_all_is_done(layout, frames, new_device):
    device = new_device(patience=2)
    queue = TransferQueue([layout], frames, device, max_inflight_bytes=BIG)
    assert queue.flush(0)
    queue.submit_store(1, [chunk(0)])
    assert not queue.flush(0)
    device.patience = None
    assert queue.flush(0)
    assert queue.poll()[0].failed == []


# --- close --------------------------------------------------------------------------------------


def test_close_cancels_the_queued_and_ends_the_begun(queue, frames, device):
    queue.submit_store(1, [chunk(0), chunk(1)])
    queue.submit_load(2, [chunk(2)])
    step_until(device, queue, 2, State.MOVING)
    queue.submit_load(3, [chunk(3)])
    queue.close()
    queue.close()
    results = {ended.job_id: ended.failed for ended in queue.poll()}
    assert results == {1: [0, 1], 2: [], 3: [0]}
    assert frames.state[:4] == ["failed", "failed", "empty", "empty"]
    assert frames.calls["finish_read", 3] == 1


def test_after_close_every_job_fails_at_once(queue, frames):
    queue.close()
    queue.submit_store(1, [chunk(0)])
    queue.submit_load(2, [chunk(1)])
    assert [ended.failed for ended in queue.poll()] == [[0], [0]]
    assert frames.state[:2] == ["failed", "empty"]
    assert queue.inflight_bytes == 0


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["begin_write", "finish_write"])
@pytest.mark.parametrize("answer", ["gone", "raise"])
@pytest.mark.parametrize("at", range(3))
def test_a_store_fails_alone(verb, answer, at, queue, frames, device):
    def fault(header):
        if header != at:
            return None
        if answer == "raise":
            raise OSError("injected")
        return answer

    frames.faults[verb] = fault
    queue.submit_store(1, [chunk(0), chunk(1), chunk(2)])
    device.drain()
    assert queue.poll()[0].failed == [at]
    assert [i for i in range(3) if frames.state[i] == "ready"] == [i for i in range(3) if i != at]
    assert frames.state[at] == ("empty" if (verb, answer) == ("finish_write", "gone") else "failed")
    assert queue.counters.errors == (answer == "raise")


@pytest.mark.parametrize("verb", ["begin_read", "finish_read"])
@pytest.mark.parametrize("at", range(3))
def test_a_load_fails_alone_and_the_frame_is_told(verb, at, queue, frames, device):
    def fault(header):
        if header == at:
            raise OSError("injected")

    frames.faults[verb] = fault
    queue.submit_load(1, [chunk(0), chunk(1), chunk(2)])
    device.drain()
    assert queue.poll()[0].failed == [at]
    assert all(frames.calls["finish_read", header] == 1 for header in range(3))
    if verb == "begin_read":
        assert [i for i in range(3) if frames.state[i] == "bad"] == [at]


@pytest.mark.parametrize("fault", ["copy", "enqueue"])
@pytest.mark.parametrize("is_load", [False, True])
def test_a_copy_that_raises_fails_its_chunk(fault, is_load, queue, frames, device):
    def broken(move):
        if move.block_ids[0] == CHUNK:
            raise RuntimeError("injected")

    device.faults[fault] = broken
    submit = queue.submit_load if is_load else queue.submit_store
    submit(1, [chunk(0), chunk(1), chunk(2)])
    device.drain()
    assert queue.poll()[0].failed == [1]
    assert frames.state[1] == ("bad" if is_load else "failed")


def test_a_part_of_another_size_is_not_touched(queue, frames, device, layout):
    frames.faults["begin_write"] = lambda header: (0, layout.part_bytes - 64)
    queue.submit_store(1, [chunk(0)])
    device.drain()
    assert queue.poll()[0].failed == [0]
    assert (frames.memory == 0xA5).all()


def test_an_error_is_logged_once_with_its_traceback_and_counted(queue, frames, device, caplog):
    def fault(header):
        raise OSError("injected")

    frames.faults["finish_write"] = frames.faults["fail_write"] = fault
    queue.submit_store(1, [chunk(at) for at in range(5)])
    device.drain()
    assert queue.poll()[0].failed == [0, 1, 2, 3, 4]
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 2  # ending, and failing after it
    assert all(record.exc_info for record in errors)
    assert queue.counters.errors == 10


def test_copies_wait_for_the_engines_own_work(queue, frames, device):
    class EngineWork:
        passed = False

        def query(self):
            return self.passed

    device.engine_event = EngineWork()
    device.touched = lambda is_load, block: pytest.fail("the engine has not written it yet")
    queue.submit_store(1, [chunk(0)])
    for _ in range(20):
        device.step()
    device.touched = lambda is_load, block: None
    device.engine_event.passed = True
    device.drain()
    assert queue.poll()[0].failed == []
