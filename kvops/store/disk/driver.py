"""The thread that moves blobs between frames and the disk: it submits, checks, publishes, and gives everything back.

    asked --> prepared (place, header page) --> in flight --> checked / published --> ended
                 |                                 |
                 +-- no place: ended               +-- deadline: late, answered; ended, once, when the drive lets go

Whatever may wait for the disk, a new segment or a sync as well, is done here and not by whoever asks.

A move is never given up while a drive may still touch its memory. A load is believed only if the header page carries the
key, namespace, size and generation that were asked for and every part has its checksum; until then the frame is one that
is being written, which nobody reads.
"""

import collections
import contextlib
import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.file_io import Completion, Direction, FileIo, Request
from kvferry.kvops.trace import Stages, current

from .files import BlobFiles, Place, Refusal
from .format import TRUNCATED, UNREADABLE
from .headers import mark_failed
from .jobs import REFUSALS, Move, Status, place_of
from .requests import MERGED_BLOBS, MERGED_BYTES, HeaderPages, moves_of
from .upkeep import Upkeep

logger = logging.getLogger(__name__)

IDLE_S = 1.0
"""Longest wait for a completion, seconds; whoever asks for something ends it."""

AFTER_ERROR_S = 0.01
"""Pause before an engine that said no is asked again, seconds."""

TRIES = 3
"""How often something is tried that the kernel asks to try again."""

WORTH_WAKING = 256
"""Moves that ended, after which somebody who waits is woken while others are still in flight."""

STEP_REQUESTS = 8
"""Requests prepared before the engine gets them: the drive works while the next ones are prepared."""

STEP_BYTES = 8 << 20
"""Bytes of requests that have ended, after which more are submitted before the next ones are looked at."""

WORTH_PUBLISHING = 128
"""Saves that were written, after which they are published though there is more to submit."""

PUBLISH_WITHIN_S = 0.01
"""How long saves that were written may wait for others while there is more to submit, seconds."""


class Driver:
    """One thread, one I/O engine, moves of one arena.

    Attributes:
        ended: moves that are the tier's again, frame, place and all.
        late: moves whose deadline has passed; they are not ended yet.
        stages: seconds by stage: queue, io, checksum, publish.

    Threads: *ask* and the queues may be used by one thread beside the driver's own.
    Deadlines are by *clock*, everything else by the engine's.
    Ownership: *files* and *io* stay the caller's. *report* is called every few seconds, by the driver's thread.
    """

    def __init__(
        self,
        files: BlobFiles,
        io: FileIo,
        arena: Arena,
        parts: int,
        report: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ended: collections.deque[Move] = collections.deque()
        self.late: collections.deque[Move] = collections.deque()
        self.stages = Stages(trace=current())
        self.changed = threading.Event()
        self.is_broken = False
        self._files = files
        self._io = io
        self._arena = arena
        self._parts = parts
        self._loads: collections.deque[Move] = collections.deque()
        self._saves: collections.deque[Move] = collections.deque()
        self._prepared: list[Request] = []
        self._flying: set[Move] = set()
        self._reaped: collections.deque[Completion] = collections.deque()
        # on the disk, and not published yet
        self._written: list[Move] = []
        # asked for and not ended, wherever they are
        self._unended: set[Move] = set()
        pages = io.depth * MERGED_BLOBS
        self._pages = HeaderPages(pages, parts, arena)
        self._is_stopping = self._has_ended = self._said_engine = False
        self._upkeep = Upkeep(files, report)
        self._clock = clock
        # the earliest deadline of those in flight
        self._look_s = math.inf
        self._publish_at_s = 0.0
        self._refusals = 0
        self._thread = threading.Thread(target=self._run, name="kvferry-disk", daemon=True)
        self._thread.start()

    def ask(self, moves: Sequence[Move]) -> None:
        """Queue moves, all of one direction; loads go first. Never waits."""
        self._unended.update(moves)
        (self._loads if moves[0].direction is Direction.READ else self._saves).extend(moves)
        self._io.wake()
        if self._has_ended:
            # it may have emptied its queues just before
            self._give_back_waiting()

    def close(self, timeout_s: float) -> bool:
        """End the thread; what has not begun is given back as OFF. False if a drive still holds memory of ours."""
        self._is_stopping = True
        self._io.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._flying

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._is_stopping and not self._flying and not self._written):
                self._submit()
                self._reap()
                self._finish(self._next())
                self._publish()
                self._expire()
                if self.late or (
                    self.ended and (not self._flying or len(self.ended) >= WORTH_WAKING)
                ):
                    self.changed.set()
                self._upkeep.see_to(is_idle=not self._unended)
        except BaseException:
            logger.exception("the disk thread ended: kvferry goes on without the disk")
            self.is_broken = True
        finally:
            self._has_ended = True
            try:
                self._give_back_waiting()
                for request in self._prepared:
                    for move in moves_of(request):
                        self._drop(move, Status.OFF)
            except Exception:
                logger.exception("the disk thread could not give everything back")
            finally:
                # only if it broke: their memory stays the drive's, since nobody will ever know better
                self._let_late(list(self._unended))
                self.changed.set()

    def _give_back_waiting(self) -> None:
        for queue in (self._loads, self._saves):
            with contextlib.suppress(IndexError):
                while True:
                    self._drop(queue.popleft(), Status.OFF)

    def _submit(self) -> None:
        self._prepare()
        if not self._prepared:
            return
        try:
            taken = self._io.submit(self._prepared)
            self._refusals = 0
        except OSError as error:
            self._refusals += 1
            if error.errno == errno.EAGAIN and self._refusals < TRIES:
                time.sleep(AFTER_ERROR_S)
                return
            self._refusals = 0
            refused, self._prepared = self._prepared, []
            for request in refused:
                for move in moves_of(request):
                    self._drop(move, Status.ERROR, f"submit: {error}")
            return
        for request in self._prepared[:taken]:
            moves = moves_of(request)
            self._flying.update(moves)
            self._look_s = min(self._look_s, *[move.deadline_s for move in moves])
            self.stages.record("queue", moves[0].asked_s, request.submitted_s)
        del self._prepared[:taken]

    def _prepare(self) -> None:
        """Turn what was asked for into requests, as many as the engine may take now; loads first."""
        if self._is_stopping:
            return
        room = min(STEP_REQUESTS, self._io.depth - self._io.in_flight)
        waiting = len(self._prepared)
        loads = sum(request.direction is Direction.READ for request in self._prepared)
        made = self._make(self._loads, self._begin_loads, room - loads)
        self._prepared[:0] = made
        self._prepared += self._make(self._saves, self._begin_saves, room - waiting - len(made))

    def _make(
        self,
        queue: collections.deque[Move],
        begin: Callable[[list[Move]], list[Move]],
        room: int,
    ) -> list[Request]:
        made: list[Request] = []
        while queue and room > len(made) and self._pages.free >= MERGED_BLOBS:
            each = max(1, min(MERGED_BLOBS, MERGED_BYTES // queue[0].frame.blob_bytes))
            count = min(len(queue), self._pages.free, each * (room - len(made)))
            some = [queue.popleft() for _ in range(count)]
            made += self._pages.requests(begin(some))
        return made

    def _begin_saves(self, moves: list[Move]) -> list[Move]:
        """Find places for saves; return those that have one, the others are ended."""
        wanted = [(move.tag, move.frame.blob_bytes) for move in moves]
        begun = []
        for move, answer in zip(moves, self._files.begin_saves(wanted, self._parts), strict=True):
            if isinstance(answer, Place):
                move.place = answer
                begun.append(move)
            elif isinstance(answer, Refusal):
                self._end(move, REFUSALS[answer])
            else:
                self._end(move, Status.ERROR, f"open: {answer}")
        return begun

    def _begin_loads(self, moves: list[Move]) -> list[Move]:
        """Find the places of loads; return those that have one, the others are ended."""
        begun = []
        answers = self._files.begin_loads([move.tag for move in moves])
        for move, answer in zip(moves, answers, strict=True):
            if isinstance(answer, OSError):
                self._drop(move, Status.ERROR, f"open: {answer}")
                continue
            move.place = answer
            if (
                answer is not None
                and answer.blob_bytes == move.frame.blob_bytes
                and answer.parts == self._parts
            ):
                begun.append(move)
            else:
                self._drop(move, Status.MISSING)
        return begun

    def _goes_on(self) -> bool:
        """Return whether there is something to prepare, and room for it: then waiting would be a waste of time."""
        return bool(
            (self._loads or self._saves)
            and not (self._prepared or self._is_stopping)
            and self._io.in_flight < self._io.depth
            and self._pages.free >= MERGED_BLOBS
        )

    def _reap(self) -> None:
        if self._reaped:
            return
        is_busy = self._flying or self._prepared or self._loads or self._saves
        timeout_s = 0.0 if self._goes_on() else 0.05 if is_busy else IDLE_S
        try:
            self._reaped.extend(self._io.reap(timeout_s))
        except OSError as error:
            if not self._said_engine:
                self._said_engine = True
                logger.error("disk I/O engine %s: %s; asking again", self._io.name, error)
            time.sleep(AFTER_ERROR_S)

    def _next(self) -> list[Completion]:
        """Take some of what the engine has given back: the drive must not run dry while all of it is looked at."""
        some: list[Completion] = []
        num_bytes = 0
        while self._reaped and num_bytes < STEP_BYTES:
            some.append(self._reaped.popleft())
            num_bytes += some[-1].count
        return some

    def _finish(self, completions: list[Completion]) -> None:
        read: list[Move] = []
        for completion in completions:
            request = completion.request
            moves, is_ok = moves_of(request), completion.ok
            self._flying.difference_update(moves)
            if completion.errno in (errno.EINTR, errno.EAGAIN) and moves[0].tries < TRIES:
                moves[0].tries += 1
                self._prepared.append(request)
                continue
            if len(moves) > 1 and not is_ok:
                self._prepared += self._pages.alone(request)
                continue
            self.stages.record("io", request.submitted_s, request.done_s)
            if is_ok:
                into = read if request.direction is Direction.READ else self._written
                into += moves
            else:
                self._fail(moves[0], completion)
        if read:
            self._take_in(read)

    def _publish(self) -> None:
        """Publish what was written, many at once unless there is nothing else to do."""
        saved, begin = self._written, time.monotonic()
        is_enough = len(saved) >= WORTH_PUBLISHING or begin >= self._publish_at_s
        if saved and not is_enough and (self._reaped or self._goes_on()):
            return
        self._written, self._publish_at_s = [], begin + PUBLISH_WITHIN_S
        if not saved:
            return
        try:
            self._files.end_save([(place_of(move), move.frame.namespace) for move in saved])
        except OSError as error:
            for move in saved:
                self._files.abort_save(place_of(move))
                self._end(move, Status.ERROR, f"publish: {error}")
            return
        self.stages.record("publish", begin, time.monotonic())
        self._end_done(saved)

    def _take_in(self, read: list[Move]) -> None:
        begin = time.monotonic()
        reasons = self._pages.take_in(read)
        self.stages.record("checksum", begin, time.monotonic())
        sound: list[Move] = []
        for move, reason in zip(read, reasons, strict=True):
            if reason is None:
                sound.append(move)
            else:
                self._fail_load(move, Status.CORRUPT, reason, reason)
        self._files.end_loads([place_of(move) for move in sound])
        self._end_done(sound)

    def _fail(self, move: Move, completion: Completion) -> None:
        why = completion.why
        if move.direction is Direction.WRITE:
            self._files.abort_save(place_of(move))
            self._end(move, Status.ERROR, why)
        elif completion.errno:
            # the drive may be able to read it another time, but not a third
            self._fail_load(move, Status.ERROR, why, UNREADABLE if move.is_second else None)
        else:
            self._fail_load(move, Status.CORRUPT, why, TRUNCATED)

    def _fail_load(self, move: Move, status: Status, why: str, bad: str | None) -> None:
        mark_failed(self._arena, move, self._parts)
        self._files.end_load(place_of(move), bad=bad)
        self._end(move, status, why)

    def _expire(self) -> None:
        now = self._clock()
        for queue in (self._loads, self._saves):
            while queue and queue[0].deadline_s <= now:
                # not the drive's fault
                self._drop(queue.popleft(), Status.BUSY)
        for request in [r for r in self._prepared if moves_of(r)[0].deadline_s <= now]:
            self._prepared.remove(request)
            for move in moves_of(request):
                self._drop(move, Status.BUSY)
        if self._look_s <= now:
            self._let_late(
                move for move in (*self._flying, *self._written) if move.deadline_s <= now
            )
            # how far the others are from it is not worth a look each time
            left = (move.deadline_s for move in (*self._flying, *self._written) if not move.is_late)
            self._look_s = min(left, default=math.inf)

    def _let_late(self, moves: Iterable[Move]) -> None:
        for move in moves:
            if not move.is_late:
                move.is_late = True
                self.late.append(move)

    def _drop(self, move: Move, status: Status, why: str = "") -> None:
        """Give back a move that no drive has touched, and its place on the disk if it has one."""
        if move.direction is Direction.READ:
            mark_failed(self._arena, move, self._parts)
            if move.place is not None:
                self._files.end_load(move.place)
        elif move.place is not None:
            self._files.abort_save(move.place)
        self._end(move, status, why)

    def _end(self, move: Move, status: Status, why: str = "") -> None:
        """Give a move back, whose place on the disk has been settled."""
        move.status, move.why = status, why
        self._give_back((move,))

    def _end_done(self, moves: Sequence[Move]) -> None:
        for move in moves:
            move.status = Status.DONE
        self._give_back(moves)

    def _give_back(self, moves: Sequence[Move]) -> None:
        self._pages.give_back(moves)
        for move in moves:
            move.place = None
        self._unended.difference_update(moves)
        self.ended.extend(moves)
