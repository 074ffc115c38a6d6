"""The queue on real threads."""

import threading

import pytest
import torch

from kvferry.kvops.transfer.host_device import HostDevice
from kvferry.kvops.transfer.queue import Copy, TransferQueue

CHUNK = 3
DEADLINE_S = 60


@pytest.fixture
def new_queue(layout):
    queues = []

    def make(frames, threads=1, bound=1 << 30):
        queue = TransferQueue.on_host([layout], frames, max_inflight_bytes=bound, threads=threads)
        queues.append(queue)
        return queue

    yield make
    for queue in queues:
        queue.close()


def ours():
    return [t.name for t in threading.enumerate() if t.name.startswith("kvferry-transfer")]


def chunk(at, header):
    return Copy(0, 0, range(at * CHUNK, at * CHUNK + CHUNK), header, 1)


def test_threads_are_named_and_joined(new_queue, layout, new_frames):
    queue = new_queue(new_frames(layout.part_bytes, 1), threads=3)
    assert sorted(ours()) == [f"kvferry-transfer-{i}" for i in range(3)]
    queue.close()
    assert ours() == []
    queue.close()


def test_no_thread_is_refused():
    with pytest.raises(ValueError, match="threads must be at least 1; got 0"):
        HostDevice(0)


def test_a_store_and_a_load_carry_the_bytes(new_queue, layout, new_frames, blob_of):
    frames = new_frames(layout.part_bytes, 4)
    queue = new_queue(frames)
    expected = [blob_of(layout, chunk(at, 0).block_ids) for at in range(4)]
    queue.submit_store(1, [chunk(at, at) for at in range(4)])
    assert queue.flush(DEADLINE_S)
    assert queue.poll()[0].failed == []
    queue.submit_load(2, [chunk(10 + at, at) for at in range(4)])
    queue.wait([2], DEADLINE_S)
    assert queue.poll()[0].failed == []
    for at in range(4):
        assert torch.equal(blob_of(layout, chunk(10 + at, 0).block_ids), expected[at])


def test_giving_way_ends_with_the_first_job_and_at_once_without_a_load(
    new_queue, layout, new_frames
):
    frames = new_frames(layout.part_bytes, 4)
    queue = new_queue(frames)
    # each of these would last until the test's time is up if it waited for what does not come
    queue.give_way(10 * DEADLINE_S)
    queue.submit_store(1, [chunk(0, 0)])
    queue.give_way(10 * DEADLINE_S)
    assert queue.flush(DEADLINE_S)
    queue.submit_load(2, [chunk(10, 0)])
    queue.give_way(10 * DEADLINE_S)
    queue.give_way(10 * DEADLINE_S)
    assert 1 in {ended.job_id for ended in queue.poll()}
    queue.give_way(10 * DEADLINE_S)
    assert queue.flush(DEADLINE_S)


def test_submission_and_wait_do_not_wait_for_a_busy_thread(new_queue, layout, new_frames):
    """One store hangs in its frame; everybody else goes on."""
    frames = new_frames(layout.part_bytes, 4)
    entered, leave = threading.Event(), threading.Event()

    def hang(header):
        entered.set()
        assert leave.wait(DEADLINE_S)

    frames.faults["finish_write"] = hang
    queue = new_queue(frames)
    queue.submit_store(1, [chunk(0, 0), chunk(1, 1)])
    assert entered.wait(DEADLINE_S)
    queue.submit_store(2, [chunk(2, 2)])
    queue.wait([1, 2], DEADLINE_S)  # one was read, the others were cancelled
    assert not leave.is_set()
    assert [ended.job_id for ended in queue.poll()] == [2]
    assert not queue.flush(0)
    leave.set()
    assert queue.flush(DEADLINE_S)
    assert [(ended.job_id, ended.failed) for ended in queue.poll()] == [(1, [1])]


def test_no_exception_ends_a_thread(new_queue, layout, new_frames):
    frames = new_frames(layout.part_bytes, 2)

    def broken(header):
        raise MemoryError("injected")

    frames.faults = dict.fromkeys(["begin_write", "finish_write", "fail_write"], broken)
    queue = new_queue(frames)
    queue.submit_store(1, [chunk(0, 0)])
    assert queue.flush(DEADLINE_S)
    frames.faults = {}
    queue.submit_store(2, [chunk(1, 1)])
    assert queue.flush(DEADLINE_S)
    assert [(ended.job_id, ended.failed) for ended in queue.poll()] == [(1, [0]), (2, [])]


def test_a_step_that_raises_is_logged_and_the_thread_goes_on(caplog):
    device = HostDevice(1)
    results = [True, KeyError("injected"), False]
    done = threading.Event()

    def step():
        if not results:
            done.set()
            return False
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    device.start([step])
    for _ in range(100):
        device.wake()
        if done.wait(DEADLINE_S / 100):
            break
    device.close()
    assert done.is_set()
    assert "a step of kvferry-transfer-0 raised" in caplog.text


@pytest.mark.parametrize("threads", [1, 3])
def test_stress(threads, new_queue, layout, new_frames, blob_of):
    """Two engines' threads submit, wait, overwrite and poll; every byte that counts is right."""
    num_rounds, per_job = 150, 3
    frames = new_frames(layout.part_bytes, 2 * num_rounds * per_job)
    queue = new_queue(frames, threads)
    results, expected, errors = {}, {}, []
    lock = threading.Lock()

    def engine(who):
        mine = range(who * 10, who * 10 + 10)  # chunks of this thread
        for turn in range(num_rounds):
            job = who * num_rounds + turn
            chunks = [mine[(turn * per_job + i) % 10] for i in range(per_job)]
            headers = [job * per_job + i for i in range(per_job)]
            for at in chunks:
                for tensor in layout.tensors:
                    tensor[at * CHUNK : at * CHUNK + CHUNK] = (turn * 7 + at) % 128
            with lock:
                for at, header in zip(chunks, headers, strict=True):
                    expected[header] = blob_of(layout, chunk(at, 0).block_ids)
            copies = [chunk(at, h) for at, h in zip(chunks, headers, strict=True)]
            queue.submit_store(job, copies)
            if turn % 3 == 0:
                assert queue.flush(DEADLINE_S)
            queue.wait([job], DEADLINE_S)
            collect()

    def collect():
        with lock:
            for ended in queue.poll():
                assert ended.job_id not in results
                results[ended.job_id] = ended

    def guarded(who):
        try:
            engine(who)
        except BaseException as error:
            errors.append(error)

    engines = [threading.Thread(target=guarded, args=(who,)) for who in range(2)]
    for thread in engines:
        thread.start()
    for thread in engines:
        thread.join()
    assert not errors
    assert queue.flush(DEADLINE_S)
    collect()
    assert sorted(results) == list(range(2 * num_rounds))
    assert queue.inflight_bytes == 0
    stored = 0
    for job, ended in results.items():
        for i in range(per_job):
            header = job * per_job + i
            assert frames.endings(header) == 1
            if i in ended.failed:
                assert frames.state[header] == "failed"
            else:
                stored += 1
                blob = expected[header]
                assert torch.equal(frames.part(header)[: len(blob)], blob)
    assert stored >= 2 * num_rounds // 3 * per_job // 2
    assert queue.counters.stored_chunks == stored
