"""Where the time goes: timers by stage, always on, and a trace of single events, on request.

::

    stages = Stages(trace=current())         once, at construction
    stages.record("io", begin_s, end_s)      a stage of one blob: counted, and traced if a trace is on
    stages.snapshot()["io"]["p99_s"]         plain values, for metrics, files and people

A trace is switched on for every process of an engine by ``KVFERRY_TRACE=folder/run.json``. Each process then writes a
file of its own when it ends, the process id before the suffix (``run.4711.json``), in Chrome's JSON array format: open
it in Perfetto or chrome://tracing. Times are those of CLOCK_MONOTONIC, which all processes of a machine share, so that
several files can be laid side by side. Memory is bounded: the last events are kept, and how many were dropped is in the
file. A process that is killed with SIGKILL writes nothing. Without the variable there is no Trace: None is all that is
looked at.

Nothing of the project is imported here.
"""

import bisect
import collections
import contextlib
import itertools
import json
import logging
import math
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

VARIABLE = "KVFERRY_TRACE"
"""The environment variable that names the file of a trace."""

MAX_EVENTS = 1 << 18
"""Events that a trace keeps, about 200 bytes each; perf/bench_trace.py says what one costs."""

BUCKETS_PER_OCTAVE = 8
RELATIVE_ERROR = 2 ** (0.5 / BUCKETS_PER_OCTAVE) - 1
"""How far a percentile may be off: half a bucket, 4.4 %."""

SHORTEST_S = 2.0**-30
LONGEST_S = 2.0**14
"""Times outside are counted in the first and the last bucket: about 1 ns, and 4.5 hours."""

_FIRST_OCTAVE = -30
_BUCKETS = 44 * BUCKETS_PER_OCTAVE
_BATCH = 1024
"""Times that wait to be counted, at the most; counting them takes a third of a millisecond."""


class Stage:
    """The times of one stage. Threads: whoever has the lock of its `Stages`."""

    __slots__ = ("buckets", "max_s", "min_s", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * _BUCKETS
        self.sum_s = 0.0
        self.min_s = math.inf
        self.max_s = 0.0

    @property
    def count(self) -> int:
        """How many times there are."""
        return sum(self.buckets)

    def extend(self, times: Sequence[float]) -> None:
        """Count one time or more, in seconds."""
        buckets, log2, last = self.buckets, math.log2, _BUCKETS - 1
        for seconds in times:
            if SHORTEST_S < seconds < LONGEST_S:
                buckets[int((log2(seconds) - _FIRST_OCTAVE) * BUCKETS_PER_OCTAVE)] += 1
            else:
                buckets[last if seconds >= LONGEST_S else 0] += 1
        self.sum_s += sum(times)
        self.min_s = min(self.min_s, *times)
        self.max_s = max(self.max_s, *times)

    def percentile(self, share: float) -> float:
        """Return the time that *share* of all times (0..1) do not exceed, in seconds; 0 if there are none."""
        count = self.count
        if not count:
            return 0.0
        rank = max(1, math.ceil(share * count))
        bucket = bisect.bisect_left(list(itertools.accumulate(self.buckets)), rank)
        middle = math.pow(2.0, _FIRST_OCTAVE + (bucket + 0.5) / BUCKETS_PER_OCTAVE)
        return min(max(middle, self.min_s), self.max_s)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values, in seconds, and the buckets in use, for `Stages.merge`."""
        count = self.count
        return {
            "count": count,
            "sum_s": self.sum_s,
            "min_s": self.min_s if count else 0.0,
            "max_s": self.max_s,
            "avg_s": self.sum_s / count if count else 0.0,
            "p50_s": self.percentile(0.5),
            "p99_s": self.percentile(0.99),
            "buckets": [[index, number] for index, number in enumerate(self.buckets) if number],
        }


class Stages:
    """Timers by name: count, sum, extremes, and percentiles that are off by 4.4 % at the most.

    A time is put down by one append, and counted later, with many others: whoever is timed waits for nobody.

    Threads: all methods, any.

    Args:
        trace: where `record` and `timed` also leave single events; None for nowhere.
        clock: what `timed` reads, in seconds; `record` takes times of the same clock.
    """

    def __init__(
        self, trace: "Trace | None" = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.trace = trace
        self.clock = clock
        self._new: collections.deque[tuple[str, float]] = collections.deque()
        self._lock = threading.Lock()
        """Guards the stages, and taking from what is new; putting there needs none."""
        self._stages: dict[str, Stage] = {}

    def add(self, name: str, seconds: float) -> None:
        """Count one time of stage *name*, which comes from a closed set."""
        new = self._new
        new.append((name, seconds))
        if len(new) >= _BATCH:
            with self._lock:
                self._count()

    def _count(self) -> None:
        by_name: dict[str, list[float]] = {}
        for _ in range(len(self._new)):
            name, seconds = self._new.popleft()
            if name in by_name:
                by_name[name].append(seconds)
            else:
                by_name[name] = [seconds]
        for name, times in by_name.items():
            if name not in self._stages:
                self._stages[name] = Stage()
            self._stages[name].extend(times)

    def record(
        self,
        name: str,
        begin_s: float,
        end_s: float,
        overlaps: bool = False,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Count the time from *begin_s* to *end_s*, and trace it if a trace is on; see `Trace.add`."""
        self.add(name, end_s - begin_s)
        if self.trace is not None:
            self.trace.add(name, begin_s, end_s, overlaps, args)

    @contextlib.contextmanager
    def timed(self, name: str, args: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Record the time that the body takes, whether or not it raises."""
        begin = self.clock()
        try:
            yield
        finally:
            self.record(name, begin, self.clock(), args=args)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return every stage as JSON values, in the order of their first times; see `Stage.as_dict`."""
        with self._lock:
            self._count()
            return {name: stage.as_dict() for name, stage in self._stages.items()}

    def merge(self, snapshot: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what another one counted, perhaps in another process; *snapshot* is left as it is."""
        with self._lock:
            for name, other in snapshot.items():
                if not other["count"]:
                    continue
                stage = self._stages.setdefault(name, Stage())
                for index, number in other["buckets"]:
                    stage.buckets[index] += number
                stage.sum_s += other["sum_s"]
                stage.min_s = min(stage.min_s, other["min_s"])
                stage.max_s = max(stage.max_s, other["max_s"])

    def reset(self) -> dict[str, dict[str, Any]]:
        """Begin anew; return the last snapshot, so that no time is lost or counted twice."""
        with self._lock:
            self._count()
            stages, self._stages = self._stages, {}
        return {name: stage.as_dict() for name, stage in stages.items()}


class Trace:
    """The last events of this process, and the file they are written to.

    Threads: all methods, any. Ownership: the process's own one (`current`) is closed when the process ends; nobody
    else closes it. After a fork the child's begins empty, with a file of its own.

    Args:
        path: the file, to which the process id is added; its folder must exist.
        max_events: how many events are kept.
    """

    def __init__(self, path: str | os.PathLike[str], max_events: int = MAX_EVENTS) -> None:
        self._given = Path(path)
        self._max_events = max_events
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._names: dict[int, str] = {}
        self._events: collections.deque[tuple[Any, ...]] = collections.deque(
            maxlen=self._max_events
        )
        self._added = 0
        self._closed = False
        self._pid = os.getpid()

    @property
    def path(self) -> Path:
        """The file of this process."""
        return self._given.with_name(f"{self._given.stem}.{self._pid}{self._given.suffix}")

    @property
    def dropped(self) -> int:
        """Events that had to make room for later ones."""
        return self._added - len(self._events)

    def add(
        self,
        name: str,
        begin_s: float,
        end_s: float,
        overlaps: bool = False,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep one event of the calling thread.

        Args:
            name: what went on.
            begin_s: when it began, in seconds of CLOCK_MONOTONIC.
            end_s: when it ended.
            overlaps: other events of this thread overlap it without lying inside, as requests in flight do; it gets a
                line of its own.
            args: JSON values to show with it; kept, not copied.
        """
        try:
            thread: int = self._local.thread
        except AttributeError:
            thread = self._local.thread = threading.get_native_id()
            with self._lock:
                self._names[thread] = threading.current_thread().name
        event = (name, begin_s, end_s, thread, overlaps, args)
        with self._lock:
            if not self._closed:
                self._events.append(event)
                self._added += 1

    def flush(self) -> bool:
        """Write what there is so far, replacing the file in one step; return whether that worked."""
        with self._lock:
            events, names, added = list(self._events), dict(self._names), self._added
        path = self.path
        part = path.with_name(f"{path.name}.part")
        try:
            with part.open("w") as stream:
                before = "[\n"
                for line in self._lines(events, names, added):
                    stream.write(before + json.dumps(line, separators=(",", ":"), default=str))
                    before = ",\n"
                stream.write("\n]\n")
            part.replace(path)
        except (OSError, TypeError, ValueError) as error:
            # nobody's KV cache depends on a trace
            logger.warning("The trace could not be written to %s: %s", path, error)
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        dropped = added - len(events)
        if dropped:
            logger.warning("The trace %s lacks its first %d events", path, dropped)
        return True

    def close(self) -> None:
        """Write the file; events that come later are ignored. Calling again does nothing."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self.flush()

    def _lines(
        self, events: list[tuple[Any, ...]], names: Mapping[int, str], added: int
    ) -> Iterator[dict[str, Any]]:
        own: dict[str, Any] = {"pid": self._pid, "tid": 0}
        process = multiprocessing.current_process().name
        if process == "MainProcess":
            process = Path(sys.argv[0] if sys.argv and sys.argv[0] else "python").name
        yield own | {"ph": "M", "name": "process_name", "args": {"name": process}}
        counts = {"events": len(events), "dropped": added - len(events)}
        yield own | {"ph": "M", "name": "kvferry_trace", "args": counts}
        for thread, name in names.items():
            yield own | {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": name}}
        for number, (name, begin, end, thread, overlaps, args) in enumerate(events):
            line: dict[str, Any] = {"pid": self._pid, "tid": thread, "name": name, "cat": "kvferry"}
            line["ts"] = round(begin * 1e6, 3)
            details = {"args": dict(args)} if args else {}
            if overlaps:
                yield {**line, "ph": "b", "id": number, **details}
                yield {**line, "ph": "e", "id": number, "ts": round(end * 1e6, 3)}
            else:
                yield {**line, "ph": "X", "dur": round((end - begin) * 1e6, 3), **details}

    def _close_at_exit(self) -> None:
        # not atexit: a child that multiprocessing started ends without it; -1: after everybody else's
        multiprocessing.util.Finalize(None, self.close, exitpriority=-1)

    def _forked(self) -> None:
        # the parent's lock may have been held by a thread that does not exist here
        self._begin()
        self._close_at_exit()


_current: Trace | None = None
_current_lock = threading.Lock()


def current() -> Trace | None:
    """Return this process's trace, or None if ``KVFERRY_TRACE`` is not set. Call it at construction, not per event."""
    global _current
    if not os.environ.get(VARIABLE):
        return None
    with _current_lock:
        if _current is None:
            _current = trace = Trace(os.environ[VARIABLE])
            logger.info("Tracing to %s", trace.path)
            if not os.access(trace.path.parent, os.W_OK):
                logger.warning("%s: no folder that can be written to: %s", VARIABLE, trace.path)
            forked = weakref.WeakMethod(trace._forked)
            os.register_at_fork(after_in_child=lambda: (again := forked()) and again())
            # multiprocessing forgets what was to be done at exit when it forks, and then calls this
            multiprocessing.util.register_after_fork(trace, Trace._close_at_exit)
            trace._close_at_exit()
        return _current
