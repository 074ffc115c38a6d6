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
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.file_io import Completion, Direction, FileIo, Request
from kvferry.kvops.trace import Stages, current

from .files import BlobFiles, Place, Refusal
from .format import TRUNCATED, header_area, pack_header_page
from .headers import check_blob, header_for_disk
from .jobs import Move, Status

logger = logging.getLogger(__name__)

IDLE_S = 1.0
"""Longest wait for a completion, seconds; whoever asks for something ends it."""

AFTER_ERROR_S = 0.01
"""Pause before an engine that said no is asked again, seconds."""

TRIES = 3
"""How often something is tried that the kernel asks to try again."""

REFUSALS = {
    Refusal.EXISTS: Status.EXISTS, Refusal.PENDING: Status.PENDING, Refusal.NO_ROOM: Status.NO_ROOM,
}  # fmt: skip

REPORT_EVERY_S = 5.0
"""Time between two reports, seconds."""


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
        self._area = header_area(parts)
        self._loads: collections.deque[Move] = collections.deque()
        self._saves: collections.deque[Move] = collections.deque()
        self._prepared: list[Request] = []
        self._flying: set[Move] = set()
        self._memory = mmap.mmap(-1, io.depth * self._area)
        self._pages = memoryview(self._memory)
        self._pages_address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self._free_pages = list(range(io.depth))
        self._is_stopping = self._has_ended = False
        self._report = report
        self._clock = clock
        self._next_report_s = 0.0
        self._refusals = 0
        self._said_engine = self._said_sync = False
        self._thread = threading.Thread(target=self._run, name="kvferry-disk", daemon=True)
        self._thread.start()

    def ask(self, moves: Iterable[Move]) -> None:
        """Queue moves; loads go first. Never waits."""
        for move in moves:
            (self._loads if move.direction is Direction.READ else self._saves).append(move)
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
            while not (self._is_stopping and not self._flying):
                self._submit()
                completions = self._reap()
                self._finish(completions)
                self._expire()
                if not completions:
                    self._sync_if_due()
                self._report_at_times()
        except BaseException:
            logger.exception("the disk thread ended: kvferry goes on without the disk")
            self.is_broken = True
        finally:
            self._has_ended = True
            self._give_back_waiting()
            for request in self._prepared:
                self._drop(self._move(request), Status.OFF)
            # only if it broke: their memory stays the drive's, since nobody will ever know better
            self._let_late(self._flying)
            self.changed.set()

    def _give_back_waiting(self) -> None:
        for queue in (self._loads, self._saves):
            with contextlib.suppress(IndexError):
                while True:
                    self._drop(queue.popleft(), Status.OFF)

    def _submit(self) -> None:
        room = self._io.depth - self._io.in_flight - len(self._prepared)
        while room > 0 and self._free_pages and (self._loads or self._saves):
            if self._is_stopping:
                return
            move = (self._loads or self._saves).popleft()
            if self._begin(move):
                self._prepared.append(self._prepare(move))
                room -= 1
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
                self._drop(self._move(request), Status.ERROR, f"submit: {error}")
            return
        for request in self._prepared[:taken]:
            move = self._move(request)
            self._flying.add(move)
            self.stages.record("queue", move.asked_s, request.submitted_s)
        del self._prepared[:taken]

    def _begin(self, move: Move) -> bool:
        """Find a place for a save, or that of a load; False if the move ended for want of one."""
        frame, files = move.frame, self._files
        try:
            if move.direction is Direction.WRITE:
                place = files.begin_save(move.tag, frame.blob_bytes, self._parts)
                if isinstance(place, Refusal):
                    self._end(move, REFUSALS[place])
                    return False
                move.place = place
                return True
            move.place = files.begin_load(move.tag)
        except OSError as error:
            self._drop(move, Status.ERROR, f"open: {error}")
            return False
        found = move.place
        if found is None or (found.blob_bytes, found.parts) != (frame.blob_bytes, self._parts):
            self._drop(move, Status.MISSING)
            return False
        return True

    def _prepare(self, move: Move) -> Request:
        move.page = self._free_pages.pop()
        frame, place, at = move.frame, self._place(move), move.page * self._area
        if move.direction is Direction.WRITE:
            begin = time.monotonic()
            header = header_for_disk(self._arena.buffer, frame, self._parts)
            self.stages.record("checksum", begin, time.monotonic())
            pack_header_page(
                self._pages, at, generation=place.generation, blob_bytes=frame.blob_bytes, frame_header=header
            )  # fmt: skip
        pieces = (
            (self._pages_address + at, self._area),
            (self._arena.address + frame.offset, fmt.round_up(frame.blob_bytes, fmt.PAGE)),
        )
        return Request(move.direction, place.fd, place.offset, pieces, owner=move)

    def _reap(self) -> list[Completion]:
        timeout_s = IDLE_S
        if self._flying or self._prepared or self._loads or self._saves:
            timeout_s = 0.05
        try:
            return self._io.reap(timeout_s)
        except OSError as error:
            if not self._said_engine:
                self._said_engine = True
                logger.error("disk I/O engine %s: %s; asking again", self._io.name, error)
            time.sleep(AFTER_ERROR_S)
            return []

    def _finish(self, completions: list[Completion]) -> None:
        saved: list[Move] = []
        for completion in completions:
            request = completion.request
            move = self._move(request)
            self._flying.remove(move)
            if completion.errno in (errno.EINTR, errno.EAGAIN) and move.tries < TRIES:
                move.tries += 1
                self._prepared.append(request)
                continue
            self.stages.record("io", request.submitted_s, request.done_s)
            if move.direction is Direction.READ:
                self._finish_load(move, completion)
            elif completion.ok:
                saved.append(move)
            else:
                self._files.abort_save(self._place(move))
                self._end(move, Status.ERROR, _why(completion))
        if saved:
            self._publish(saved)

    def _publish(self, saved: list[Move]) -> None:
        begin = time.monotonic()
        try:
            self._files.end_save([(self._place(move), move.frame.namespace) for move in saved])
        except OSError as error:
            for move in saved:
                self._files.abort_save(self._place(move))
                self._end(move, Status.ERROR, f"publish: {error}")
            return
        self.stages.record("publish", begin, time.monotonic())
        for move in saved:
            self._end(move, Status.DONE)

    def _finish_load(self, move: Move, completion: Completion) -> None:
        if completion.errno:
            # the drive may be able to read it another time
            self._fail_load(move, Status.ERROR, _why(completion), None)
            return
        if not completion.ok:
            self._fail_load(move, Status.CORRUPT, _why(completion), TRUNCATED)
            return
        at = move.page * self._area
        begin = time.monotonic()
        found = check_blob(
            self._pages[at : at + self._area], self._arena.buffer, move.frame, self._place(move), self._parts
        )  # fmt: skip
        self.stages.record("checksum", begin, time.monotonic())
        if isinstance(found, str):
            self._fail_load(move, Status.CORRUPT, found, found)
            return
        for rank, _, algorithm, offset, size, value in found.parts:
            part = move.frame.header + fmt.HEADER_FIXED_BYTES + rank * fmt.PART_BYTES
            fmt.PART.pack_into(
                self._arena.buffer, part, rank, fmt.PartState.READY, algorithm, 0, offset, size, value
            )  # fmt: skip
        self._files.end_load(self._place(move))
        self._end(move, Status.DONE)

    def _fail_load(self, move: Move, status: Status, why: str, bad: str | None) -> None:
        self._mark_failed(move)
        self._files.end_load(self._place(move), bad=bad)
        self._end(move, status, why)

    def _mark_failed(self, move: Move) -> None:
        """Say in the frame that nothing more comes: a frame that a reset left behind is freed by that."""
        for rank in range(self._parts):
            part = move.frame.header + fmt.HEADER_FIXED_BYTES + rank * fmt.PART_BYTES
            self._arena.buffer[part + 2] = fmt.PartState.FAILED

    def _expire(self) -> None:
        now = self._clock()
        for queue in (self._loads, self._saves):
            while queue and queue[0].deadline_s <= now:
                # not the drive's fault
                self._drop(queue.popleft(), Status.BUSY)
        waiting = [self._move(request) for request in self._prepared]
        for move in [move for move in waiting if move.deadline_s <= now]:
            del self._prepared[waiting.index(move)]
            waiting.remove(move)
            self._drop(move, Status.BUSY)
        self._let_late(move for move in self._flying if move.deadline_s <= now)

    def _let_late(self, moves: Iterable[Move]) -> None:
        for move in moves:
            if not move.is_late:
                move.is_late = True
                self.late.append(move)
                self.changed.set()

    def _drop(self, move: Move, status: Status, why: str = "") -> None:
        """Give back a move that no drive has touched, and its place on the disk if it has one."""
        if move.direction is Direction.READ:
            self._mark_failed(move)
            if move.place is not None:
                self._files.end_load(move.place)
        elif move.place is not None:
            self._files.abort_save(move.place)
        self._end(move, status, why)

    def _end(self, move: Move, status: Status, why: str = "") -> None:
        """Give a move back, whose place on the disk has been settled."""
        if move.page >= 0:
            self._free_pages.append(move.page)
            move.page = -1
        move.place = None
        move.status, move.why = status, why
        self.ended.append(move)
        self.changed.set()

    def _sync_if_due(self) -> None:
        try:
            self._files.sync_if_due()
            self._said_sync = False
        except OSError as error:
            # what it would have made durable is as it is under "never"; the next save meets the same disk, and counts
            if not self._said_sync:
                self._said_sync = True
                logger.warning("disk tier: sync: %s; trying again each second", error)

    def _report_at_times(self) -> None:
        now = time.monotonic()
        if now >= self._next_report_s:
            self._next_report_s = now + REPORT_EVERY_S
            self._report()

    @staticmethod
    def _place(move: Move) -> Place:
        assert move.place is not None, "the move has begun"
        return move.place

    @staticmethod
    def _move(request: Request) -> Move:
        move = request.owner
        assert isinstance(move, Move)
        return move


def _why(completion: Completion) -> str:
    if completion.errno:
        return f"{completion.request.direction.value}: {os.strerror(completion.errno)}"
    return f"{completion.request.direction.value}: {completion.count} of {completion.request.num_bytes} bytes"
