"""The disk below the arena: which chunks go down, which come up, and what is said when the disk doesn't answer.

The store's one thread asks and polls; the driver's thread moves (driver.py). Nothing here waits for a drive.

    save   frame pinned   -> place reserved  -> written, published                      -> unpinned
    load   place held     -> frame reserved  -> read, key and checksums compared        -> committed, or aborted

A frame under way is not evicted, and one that is being loaded is not readable, whatever happens around them; both stay
the tier's until the drive has let go, also past a deadline and through a reset.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvferry.kvops.store.file_io import Direction, FileIo
from kvferry.kvops.store.frame import Frame
from kvferry.kvops.store.store import Store

from . import last_run
from .admission import Admission, Policy, by_tag
from .driver import Driver
from .files import BlobFiles
from .format import blob_tag
from .fresh import Fresh
from .health import FAILURES, VERBS, Health
from .jobs import Handle, Move, Status
from .loads import Loads
from .places import Tag

logger = logging.getLogger(__name__)

PRESSURE = 0.1
"""Share of free memory in the arena below which "pressure" saves what would go next."""

PRESSURE_BATCH = 64
"""Frames looked at in one step under pressure."""

TOGETHER = 256
"""Chunks of one call that are handed to the driver together: it begins while the next ones are prepared."""


class DiskTier:
    """One store's disk.

    Attributes:
        counts: what happened since it was opened; see :meth:`stats`. io_name: of the I/O engine.

    Threads: the store's one thread.
    Ownership: owns *files* and *io*; *store* is the caller's, and must be closed after the tier.
    """

    def __init__(
        self,
        store: Store,
        files: BlobFiles,
        io: FileIo,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._files = files
        self._io, self.io_name = io, io.name
        self._policy = policy or Policy()
        self._clock = clock
        self._admission = Admission(self._policy)
        self._health = Health(files.folder, clock)
        self._saving_bytes = 0
        self._saving: set[Tag] = set()
        self._was_stored = False
        self._to_start: list[Move] = []
        self._fresh = Fresh(store, clock)
        self._loads = Loads(store, files, self._health, self._policy, self._fresh, clock)
        self._is_closed = self._has_ended = False
        self._held = files.stats()
        self.counts: dict[str, int] = dict.fromkeys(
            ("saved", "saved_bytes", "loaded", "loaded_bytes", "skipped_busy", "skipped_off",
             "skipped_no_room", "save_error", "save_timeout", "load_error", "load_timeout", "load_corrupt"), 0,
        )  # fmt: skip
        self._driver = Driver(files, io, store.arena, store.parts, self._report, clock)

    # --- looking -----------------------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Return whether the disk says it has a chunk of the store's namespace. No system call, no lock."""
        return self._files.contains(blob_tag(self._store.namespace, key))

    def is_loading(self, key: bytes) -> bool:
        """Return whether a chunk is on its way up."""
        return (self._store.namespace, key) in self._loads.moving

    def is_fresh(self, frame: Frame) -> bool:
        """Return whether a chunk came up and nobody has read it yet."""
        return frame in self._fresh

    # --- going down --------------------------------------------------------------------------------------------

    def stored(self, frames: Iterable[Frame]) -> None:
        """Note chunks that have just become readable; save those that are worth it."""
        tagged = by_tag(frames)
        self._was_stored = True
        self._save_new(tagged, self._admission.stored(tagged))

    def used(self, frames: Iterable[Frame]) -> None:
        """Note chunks that were hit in memory: what is reused is worth a write, if it has none yet."""
        tagged = by_tag(frames)
        self._save_new(tagged, self._admission.used(tagged))

    def _relieve(self) -> None:
        """Under pressure: save what would be evicted next."""
        if self._store.free_share() < PRESSURE:
            tagged = by_tag(self._store.coldest(PRESSURE_BATCH))
            self._save_new(tagged, [tag for tag in tagged if tag in self._admission])

    def _save_new(self, frames: Mapping[Tag, Frame], tags: Iterable[Tag]) -> None:
        wanted: list[Frame | None] = [
            frames[tag] for tag in tags if frames[tag].is_ready and not self._files.contains(tag)
        ]
        if wanted:
            self._save(wanted, Handle([frame.key for frame in wanted if frame is not None]))

    def save(self, keys: Sequence[bytes], *, wait: bool = False, timeout_s: float = 60.0) -> Handle:
        """Save chunks that are in memory, whatever admission says. What the disk has already is not written again.

        Args:
            keys: of the store's namespace.
            wait: return when all is answered.
            timeout_s: or after so many seconds.

        Returns:
            Answers in request order; without *wait* they come in with :meth:`poll`.
        """
        handle = Handle(keys)
        frames: list[Frame | None] = []
        for at, key in enumerate(keys):
            frame = self._store.frames.get(key)
            if frame is None or not frame.is_ready:
                frame = None
                handle.answer(at, Status.MISSING)
            frames.append(frame)
        self._save(frames, handle)
        if wait:
            self.wait(handle, timeout_s)
        return handle

    def _save(self, frames: Sequence[Frame | None], handle: Handle) -> None:
        moves: list[Move] = []
        now, asked = self._clock(), time.monotonic()
        allowed, words = not self._is_off(Direction.WRITE), self._store.arena.words
        for at, frame in enumerate(frames):
            if frame is None:
                continue
            if not allowed:
                handle.answer(at, Status.OFF)
                self.counts["skipped_off"] += 1
                continue
            bytes_after = self._saving_bytes + frame.blob_bytes
            if self._saving_bytes and bytes_after > self._policy.max_inflight_bytes:
                handle.answer(at, Status.BUSY)
                self.counts["skipped_busy"] += 1
                continue
            tag = blob_tag(frame.namespace, frame.key)
            if self._files.contains(tag):
                handle.answer(at, Status.EXISTS)
                continue
            if tag in self._saving:
                handle.answer(at, Status.PENDING)
                continue
            if words[frame.word] != frame.ready:
                # a worker has just found it corrupt
                handle.answer(at, Status.MISSING)
                continue
            if not self._health.allows(Direction.WRITE):
                handle.answer(at, Status.OFF)
                self.counts["skipped_off"] += 1
                continue
            self._saving.add(tag)
            self._saving_bytes = bytes_after
            moves.append(
                Move(Direction.WRITE, frame, tag, handle, at, asked, now + self._policy.timeout_s)
            )
            if len(moves) == TOGETHER:
                self._start_saves(moves)
                moves = []
        self._start_saves(moves)

    def _start_saves(self, moves: Sequence[Move]) -> None:
        if moves:
            self._store.pin([move.frame for move in moves])
            self._driver.ask(moves)

    # --- coming up ---------------------------------------------------------------------------------------------

    def load(
        self,
        keys: Sequence[bytes],
        *,
        tokens: int = 0,
        start: bool = True,
        wait: bool = False,
        timeout_s: float = 60.0,
    ) -> Handle:
        """Bring chunks into memory. A chunk is readable when its answer is DONE, which :meth:`poll` gives.

        Args:
            keys: of the store's namespace.
            tokens: tokens of a chunk, for the frame header.
            start: now; else with the next :meth:`poll`, together with what others ask for until then.
            wait: return when all is answered.
            timeout_s: or after so many seconds.

        Returns:
            Answers in request order.
        """
        handle = Handle(keys)
        asked_s = time.monotonic()
        for first in range(0, len(keys), TOGETHER):
            numbers = range(first, min(first + TOGETHER, len(keys)))
            if self._is_off(Direction.READ):
                for at in numbers:
                    handle.answer(at, Status.OFF)
            else:
                self._to_start += self._loads.begin(handle, numbers, tokens, asked_s)
            if start:
                self._start()
        if wait:
            self.wait(handle, timeout_s)
        return handle

    def _start(self) -> None:
        if self._to_start:
            self._driver.ask(self._to_start)
            self._to_start = []

    def claimed(self, frames: Iterable[Frame]) -> None:
        """Note that somebody reads chunks that were loaded ahead: his lease keeps them now."""
        self._fresh.let_go(frames)

    # --- each step ---------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what has ended; call it once a step. Never waits."""
        driver, now = self._driver, self._clock()
        self._start()
        driver.changed.clear()
        while driver.late:
            move = driver.late.popleft()
            self._answer(move, Status.TIMEOUT, "no answer in time")
        if driver.ended:
            self._take_back([driver.ended.popleft() for _ in range(len(driver.ended))])
        self._health.settle()
        self._fresh.expire(now)
        if self._policy.write == "pressure" and self._was_stored:
            self._was_stored = False
            self._relieve()

    def _take_back(self, moves: Sequence[Move]) -> None:
        loads = [move for move in moves if move.direction is Direction.READ]
        if loads:
            self._take_back_loads(loads)
        saves = [move for move in moves if move.direction is Direction.WRITE]
        for move in saves:
            self._saving_bytes -= move.frame.blob_bytes
            self._saving.discard(move.tag)
        self._store.unpin([move.frame for move in saves])
        saved = [move for move in saves if move.status is Status.DONE]
        self.counts["saved"] += len(saved)
        self.counts["saved_bytes"] += sum([move.frame.blob_bytes for move in saved])
        self._answer_done(saved)
        for move in saves:
            status = move.status
            if status is Status.DONE:
                continue
            if status in (Status.NO_ROOM, Status.BUSY):
                self.counts[f"skipped_{status.value}"] += 1
            self._answer(move, status, move.why)

    def _take_back_loads(self, moves: Sequence[Move]) -> None:
        self._loads.end(moves)
        for move in moves:
            if move.status is not Status.DONE:
                self._store.abort((move.frame,))
                self._answer(move, move.status, move.why)
        loaded = [move for move in moves if move.status is Status.DONE]
        committed = self._store.commit([move.frame for move in loaded])
        if not all(committed):
            for move, is_there in zip(loaded, committed, strict=True):
                if not is_there:
                    self._answer(move, Status.MISSING, "")
            loaded = [move for move, is_there in zip(loaded, committed, strict=True) if is_there]
        self._answer_done(loaded)
        there = [move.frame for move in loaded]
        self._fresh.add(there, self._clock() + self._policy.hold_s)
        self.counts["loaded"] += len(there)
        self.counts["loaded_bytes"] += sum([frame.blob_bytes for frame in there])

    def _answer_done(self, moves: Sequence[Move]) -> None:
        # what is late was answered, and counted, when its deadline passed
        done = [move for move in moves if not move.is_late]
        self._health.note_done(done)
        for move in done:
            move.handle.answer(move.at, Status.DONE)

    def _answer(self, move: Move, status: Status, why: str) -> None:
        if move.is_late and status is not Status.TIMEOUT:
            # it was answered, and counted, when its deadline passed
            return
        if status in FAILURES:
            self.counts[f"{VERBS[move.direction]}_{status.value}"] += 1
        self._health.note(move, status, why)
        move.handle.answer(move.at, status)

    def _is_off(self, direction: Direction) -> bool:
        return self._is_closed or self._driver.is_broken or self._health.refuses(direction)

    # --- life --------------------------------------------------------------------------------------------------

    def wait(self, handle: Handle, timeout_s: float) -> bool:
        """Poll until *handle* has all its answers; False after *timeout_s* seconds. Not for a thread that must not wait."""
        until_s = time.monotonic() + timeout_s
        while True:
            self.poll()
            left_s = until_s - time.monotonic()
            if handle.is_done or left_s <= 0:
                return handle.is_done
            self._driver.changed.wait(min(left_s, 0.1))

    def give_way(self, timeout_s: float) -> None:
        """If something is under way, wait until something has ended: for steps that have nothing else to do."""
        if self._loads.moving or self._saving:
            self._driver.changed.wait(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait for everything that was asked for; False if time ran out. How durable it is then, the sync policy says."""
        until_s = time.monotonic() + timeout_s
        self._start()
        while self._saving or self._loads.moving:
            if time.monotonic() >= until_s or self._driver.is_broken:
                return False
            self._driver.changed.wait(0.01)
            self.poll()
        return True

    def stats(self) -> dict[str, int]:
        """Return sizes in bytes, counts of what happened, and what the disk held a few seconds ago."""
        return {
            **self._held,
            **self.counts,
            "not_admitted": self._admission.refused,
            "inflight_bytes": self._saving_bytes + self._loads.num_bytes,
            "saves_off": int(self._health.is_off(Direction.WRITE)),
            "loads_off": int(self._health.is_off(Direction.READ)),
        }

    def stages(self) -> dict[str, dict[str, float]]:
        """Return the stage timers: queue, io, checksum, publish."""
        return self._driver.stages.snapshot()

    def _report(self) -> None:
        """Leave figures in the folder, from the driver's thread; a disk that can't take them is noticed elsewhere."""
        try:
            self._held = self._files.stats()
            last_run.write(self._files.folder, self.stats(), self.stages())
        except OSError as error:
            logger.debug("%s: %s", last_run.NAME, error)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Finish what is under way and let go of the folder; False, to be called again, while a drive holds the arena."""
        if self._has_ended:
            return True
        if not self._is_closed:
            self.flush(timeout_s / 2)
        self._is_closed = True
        if self._driver.close(timeout_s / 2) or self._driver.is_broken:
            # of a thread that broke, something may be in flight
            self._has_ended = self._io.close(timeout_s / 2)
        self.poll()
        self._fresh.let_go_all()
        if self._has_ended:
            self._report()
            self._files.close()
            _stuck.discard(self)
        else:
            _stuck.add(self)
        return self._has_ended


_stuck: set[DiskTier] = set()
"""Tiers whose drive has not answered: the memory that it may still write stays while the process lives."""
