"""Timers and traces: figures against numpy, threads, files that a viewer can load, and nothing at all when off."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvferry.kvops import trace as tracing
from kvferry.kvops.trace import RELATIVE_ERROR, Stages, Trace

NONE = {"count": 0, "sum_s": 0.0, "min_s": 0.0, "max_s": 0.0, "avg_s": 0.0, "p50_s": 0.0}


class Clock:
    """A clock that goes forward only when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def _off(monkeypatch):
    monkeypatch.delenv(tracing.VARIABLE, raising=False)
    monkeypatch.setattr(tracing, "_current", None)


def load(trace):
    return json.loads(trace.path.read_text())


def of_kind(events, kind):
    return [event for event in events if event["ph"] == kind]


def counts_of(events):
    return next(event["args"] for event in events if event["name"] == "kvferry_trace")


# ---------------------------------------------------------------------------------------- timers


def test_figures_of_an_injected_delay():
    clock = Clock()
    stages = Stages(clock=clock)
    for delay in [0.25, 0.5, 0.25, 1.0]:
        with stages.timed("io"):
            clock.now += delay
    stages.record("queue", 3.0, 3.125)
    found = stages.snapshot()
    assert list(found) == ["io", "queue"]
    io = found["io"]
    assert (io["count"], io["sum_s"], io["avg_s"]) == (4, 2.0, 0.5)
    assert (io["min_s"], io["max_s"]) == (0.25, 1.0)
    assert io["p50_s"] == pytest.approx(0.25, rel=RELATIVE_ERROR)
    assert io["p99_s"] == pytest.approx(1.0, rel=RELATIVE_ERROR)
    # the only one there is, so it is not off at all
    assert found["queue"]["p50_s"] == found["queue"]["p99_s"] == 0.125


def test_a_body_that_raises_is_timed_too():
    clock = Clock()
    stages = Stages(clock=clock)
    with contextlib.suppress(KeyError), stages.timed("io"):
        clock.now += 2.0
        raise KeyError
    assert stages.snapshot()["io"]["sum_s"] == 2.0


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0])
@pytest.mark.parametrize("kind", ["lognormal", "two humps", "constant", "few"])
def test_percentiles_are_within_the_stated_error_of_numpy(kind, share):
    random = np.random.default_rng(11)
    times = {
        "lognormal": random.lognormal(-9, 2, 20_000),
        "two humps": np.concatenate([random.normal(1e-4, 1e-6, 990), random.normal(0.5, 0.01, 10)]),
        "constant": np.full(100, 0.0033),
        "few": np.array([1e-6, 3e-3, 2.0]),
    }[kind]
    stages = Stages()
    for seconds in times:
        stages.add("io", float(seconds))
    stages.snapshot()
    found = stages._stages["io"].percentile(share)
    exact = float(np.quantile(times, share, method="inverted_cdf"))
    assert found == pytest.approx(exact, rel=RELATIVE_ERROR + 1e-9)
    assert RELATIVE_ERROR <= 0.05


@pytest.mark.parametrize("seconds", [2.0**n for n in range(-29, 14)])
def test_every_octave_has_its_buckets(seconds):
    stages = Stages()
    for factor in [0.999, 1.0, 1.001, 1.5]:
        stages.reset()
        # the extremes on both sides keep the answer from being clamped to the only time there is
        for time in [seconds * factor, seconds * factor, 1e-9, 16000.0]:
            stages.add("io", time)
        assert stages.snapshot()["io"]["p50_s"] == pytest.approx(
            seconds * factor, rel=RELATIVE_ERROR + 1e-9
        )


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-12, 1e-9, 1e6, float("inf")])
def test_times_outside_are_counted_all_the_same(seconds):
    stages = Stages()
    stages.add("io", seconds)
    assert stages.snapshot()["io"]["count"] == 1


def test_nothing_timed_is_nothing_shown():
    assert Stages().snapshot() == {}
    assert NONE.items() <= tracing.Stage().as_dict().items()


def test_merging_is_the_same_as_counting_in_one_place():
    random = np.random.default_rng(3)
    one, two, both = Stages(), Stages(), Stages()
    for number, seconds in enumerate(random.lognormal(-8, 1, 3000)):
        name = ("io", "copy")[number % 2]
        (one if number % 3 else two).add(name, seconds)
        both.add(name, seconds)
    two.add("only here", 1.0)
    both.add("only here", 1.0)
    # as another process would send it
    one.merge(json.loads(json.dumps(two.snapshot())))
    one.merge({"never": tracing.Stage().as_dict()})
    found, expected = one.snapshot(), both.snapshot()
    assert found.keys() == expected.keys()
    for name, stage in expected.items():
        assert found[name].pop("sum_s") == pytest.approx(stage.pop("sum_s"))
        assert found[name].pop("avg_s") == pytest.approx(stage.pop("avg_s"))
        assert found[name] == stage


def test_a_reset_hands_over_what_was_there():
    stages = Stages()
    stages.add("io", 0.5)
    assert stages.reset()["io"]["count"] == 1
    assert stages.snapshot() == {}
    stages.add("io", 0.25)
    assert stages.snapshot()["io"]["max_s"] == 0.25


def test_threads_lose_no_time_and_count_none_twice():
    stages, taken, threads, each = Stages(), Stages(), 8, 5000
    start, done = threading.Barrier(threads + 1), threading.Event()

    def work():
        start.wait()
        for number in range(each):
            stages.add(("io", "copy")[number & 1], 0.001)

    def take():
        start.wait()
        while not done.is_set():
            taken.merge(stages.reset())

    workers = [threading.Thread(target=work) for _ in range(threads)]
    taker = threading.Thread(target=take)
    for thread in [*workers, taker]:
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    taker.join()
    taken.merge(stages.reset())
    found = taken.snapshot()
    assert {name: stage["count"] for name, stage in found.items()} == {
        "io": threads * each / 2,
        "copy": threads * each / 2,
    }
    assert found["io"]["sum_s"] == pytest.approx(threads * each / 2 * 0.001)


def test_what_waits_to_be_counted_is_bounded():
    stages = Stages()
    most = 0
    for _ in range(5000):
        stages.add("io", 0.1)
        most = max(most, len(stages._new))
    assert most < tracing._BATCH
    assert stages.snapshot()["io"]["count"] == 5000


# ---------------------------------------------------------------------------------------- traces


def test_an_event_has_its_time_thread_and_name(tmp_path):
    trace = Trace(tmp_path / "run.json")
    stages = Stages(trace)
    stages.record("io", 2.0, 2.5, args={"bytes": 4096})

    def work():
        stages.record("copy", 3.0, 3.000001)

    thread = threading.Thread(target=work, name="lane 0")
    thread.start()
    thread.join()
    trace.close()
    assert trace.path == tmp_path / f"run.{os.getpid()}.json"
    events = load(trace)
    io, copy = of_kind(events, "X")
    assert (io["name"], io["ts"], io["dur"]) == ("io", 2e6, 5e5)
    assert io["args"] == {"bytes": 4096}
    assert (copy["name"], copy["ts"], copy["dur"]) == ("copy", 3e6, 1.0)
    assert {event["pid"] for event in events} == {os.getpid()}
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert names[io["tid"]] == threading.current_thread().name
    assert names[copy["tid"]] == "lane 0"
    assert io["tid"] != copy["tid"]
    assert any(event["name"] == "process_name" for event in events)
    assert counts_of(events) == {"events": 2, "dropped": 0}


def test_requests_in_flight_get_lines_of_their_own(tmp_path):
    trace = Trace(tmp_path / "run.json")
    trace.add("read", 1.0, 3.0, overlaps=True, args={"slot": 7})
    trace.add("read", 2.0, 4.0, overlaps=True)
    trace.close()
    events = load(trace)
    begins, ends = of_kind(events, "b"), of_kind(events, "e")
    assert [event["ts"] for event in begins] == [1e6, 2e6]
    assert [event["ts"] for event in ends] == [3e6, 4e6]
    assert [event["id"] for event in begins] == [event["id"] for event in ends]
    assert len({event["id"] for event in begins}) == 2
    assert begins[0]["args"] == {"slot": 7}


def test_the_last_events_are_kept_and_the_others_counted(tmp_path, caplog):
    trace = Trace(tmp_path / "run.json", max_events=10)
    for number in range(25):
        trace.add("io", float(number), number + 0.5)
    assert trace.dropped == 15
    with caplog.at_level(logging.WARNING):
        trace.close()
    assert "lacks its first 15 events" in caplog.text
    events = load(trace)
    assert [event["ts"] / 1e6 for event in of_kind(events, "X")] == list(range(15, 25))
    assert counts_of(events) == {"events": 10, "dropped": 15}


def test_threads_lose_no_event(tmp_path):
    trace = Trace(tmp_path / "run.json")

    def work():
        for number in range(2000):
            trace.add("io", float(number), number + 0.5)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    assert len(of_kind(load(trace), "X")) == 12_000


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    trace = Trace(tmp_path / "run.json")
    trace.add("first", 1.0, 2.0)
    assert trace.flush()
    trace.add("second", 2.0, 3.0)
    written = []

    def lines(self, events, names, added):
        yield {"ph": "X"}
        written.append(sorted(path.name for path in tmp_path.iterdir()))
        raise OSError("disk full")

    monkeypatch.setattr(Trace, "_lines", lines)
    assert not trace.flush()
    # what was there is still there, whole; nothing else is left
    assert [event["name"] for event in of_kind(load(trace), "X")] == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == [trace.path.name]
    assert written == [[trace.path.name, f"{trace.path.name}.part"]]


def test_a_folder_that_is_not_there_is_a_warning(tmp_path, caplog):
    trace = Trace(tmp_path / "absent" / "run.json")
    trace.add("io", 1.0, 2.0)
    with caplog.at_level(logging.WARNING):
        trace.close()
    assert "could not be written" in caplog.text


def test_closing_twice_and_events_afterwards(tmp_path):
    trace = Trace(tmp_path / "run.json")
    trace.add("io", 1.0, 2.0)
    trace.close()
    trace.path.unlink()
    trace.add("late", 2.0, 3.0)
    trace.close()
    assert not trace.path.exists()


def test_arguments_that_are_no_json_do_not_cost_the_file(tmp_path):
    trace = Trace(tmp_path / "run")
    trace.add("io", 1.0, 2.0, args={"key": b"\x00"})
    trace.close()
    assert trace.path == tmp_path / f"run.{os.getpid()}"
    assert of_kind(load(trace), "X")[0]["args"] == {"key": "b'\\x00'"}


# ------------------------------------------------------------------------------------ on and off


def test_off_is_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tracing.current() is None
    stages = Stages(trace=tracing.current())
    calls = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename == tracing.__file__:
            calls.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        for _ in range(100):
            stages.record("io", 1.0, 2.0)
    finally:
        sys.setprofile(None)
    # the timer that is always on, and nothing of a trace
    assert calls == ["record", "add"] * 100
    assert list(tmp_path.iterdir()) == []


RUN = """
import multiprocessing, os, sys, threading
from kvferry.kvops.trace import Stages, current

def work():
    stages = Stages(current())
    assert current() is current() is not None
    stages.record("child", 1.0, 2.0)

def plain_fork():
    pid = os.fork()
    if not pid:
        Stages(current()).record("grandchild", 1.0, 2.0)
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    stages = Stages(current())
    stages.record("parent", 1.0, 2.0)
    # as if a thread were in the middle of an event while we fork
    with current()._lock:
        child = multiprocessing.Process(target=work, name="worker 1")
        child.start()
        child.join()
        assert child.exitcode == 0
    plain_fork()
    print(os.getpid(), child.pid)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_process_writes_a_file_of_its_own(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(RUN)
    out = tmp_path / "out"
    out.mkdir()
    ran = subprocess.run(
        [sys.executable, script, method],
        env=os.environ | {"KVFERRY_TRACE": str(out / "run.json")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    parent, child = ran.stdout.split()
    files = {path.name.split(".")[1]: json.loads(path.read_text()) for path in out.iterdir()}
    assert len(files) == 3
    names = {pid: [e["name"] for e in of_kind(events, "X")] for pid, events in files.items()}
    assert names.pop(parent) == ["parent"]
    assert names.pop(child) == ["child"]
    assert list(names.values()) == [["grandchild"]]
    process = next(e["args"]["name"] for e in files[child] if e["name"] == "process_name")
    assert process == "worker 1"
