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
from kvferry.kvops.store.store import Reserve, Store

from . import last_run
from .admission import Admission, Policy, Tag
from .breaker import Breaker
from .driver import Driver
from .files import BlobFiles
from .format import blob_tag
from .fresh import Fresh
from .jobs import Handle, Move, Status

logger = logging.getLogger(__name__)

PRESSURE = 0.1
"""Share of free memory in the arena below which "pressure" saves what would go next."""

PRESSURE_BATCH = 64
"""Frames looked at in one step under pressure."""

_RESERVED = {answer: Status[answer.name] for answer in Reserve}


class DiskTier:
    """One store's disk.

    Attributes:
        counts: what happened since it was opened; see :meth:`stats`.

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
        self._io = io
        self._policy = policy or Policy()
        self._clock = clock
        self._admission = Admission(self._policy)
        self._breakers = {
            direction: Breaker(f"{verb} {files.folder}", clock)
            for direction, verb in (
                (Direction.WRITE, "saving to"),
                (Direction.READ, "loading from"),
            )
        }
        self._saving_bytes = self._loading_bytes = 0
        self._saving: set[tuple[int, int]] = set()
        self._loading: dict[tuple[bytes, bytes], Move] = {}
        self._to_start: list[Move] = []
        self._fresh = Fresh(store)
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
        return (self._store.namespace, key) in self._loading

    def is_fresh(self, key: bytes) -> bool:
        """Return whether a chunk came up and nobody has read it yet."""
        frame = self._store.frames.get(key)
        return frame is not None and frame in self._fresh

    @property
    def is_loading_any(self) -> bool:
        """Whether anything is on its way up."""
        return bool(self._loading)

    # --- going down --------------------------------------------------------------------------------------------

    def stored(self, frames: Iterable[Frame]) -> None:
        """Note chunks that have just become readable; save those that are worth it."""
        tagged = _by_tag(frames)
        self._save_new(tagged, self._admission.stored(tagged))

    def used(self, frames: Iterable[Frame]) -> None:
        """Note chunks that were hit in memory: what is reused is worth a write, if it has none yet."""
        tagged = _by_tag(frames)
        self._save_new(tagged, self._admission.used(tagged))

    def _relieve(self) -> None:
        """Under pressure: save what would be evicted next."""
        if self._store.free_share() < PRESSURE:
            tagged = _by_tag(self._store.coldest(PRESSURE_BATCH))
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
        allowed = not self._is_off(Direction.WRITE)
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
            try:
                self._store.pin((frame,))
            except ValueError:
                # a worker has just found it corrupt
                handle.answer(at, Status.MISSING)
                continue
            self._saving.add(tag)
            self._saving_bytes = bytes_after
            moves.append(
                Move(Direction.WRITE, frame, tag, handle, at, asked, now + self._policy.timeout_s)
            )
        if moves:
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
        now = self._clock()
        allowed = not self._is_off(Direction.READ)
        for at, key in enumerate(keys):
            found = self._begin_load(key, tokens, handle, at, now) if allowed else Status.OFF
            if isinstance(found, Status):
                handle.answer(at, found)
            else:
                self._to_start.append(found)
        if start:
            self._start()
        if wait:
            self.wait(handle, timeout_s)
        return handle

    def _begin_load(
        self, key: bytes, tokens: int, handle: Handle, at: int, now: float
    ) -> Move | Status:
        store = self._store
        if key in store.frames and store.frames[key].is_ready:
            return Status.EXISTS
        if self.is_loading(key):
            return Status.PENDING
        tag = blob_tag(store.namespace, key)
        blob_bytes = self._files.blob_bytes(tag)
        if not blob_bytes or blob_bytes % store.parts:
            return Status.MISSING
        # half of the arena stays for those who compute
        room = min(self._policy.max_inflight_bytes, store.arena.arena_bytes // 2)
        bytes_before = self._loading_bytes + self._fresh.num_bytes
        if bytes_before and bytes_before + blob_bytes > room:
            return Status.BUSY
        (answer,) = store.reserve([key], blob_bytes, tokens=tokens)
        if not isinstance(answer, Frame):
            return _RESERVED[answer]
        store.guard(answer)
        self._loading_bytes += blob_bytes
        until_s = now + self._policy.timeout_s
        move = Move(Direction.READ, answer, tag, handle, at, time.monotonic(), until_s)
        self._loading[store.namespace, key] = move
        return move

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
        while driver.ended:
            self._take_back(driver.ended.popleft())
        self._fresh.expire(now)
        if self._policy.write == "pressure":
            self._relieve()

    def _take_back(self, move: Move) -> None:
        store, frame = self._store, move.frame
        status = move.status
        if move.direction is Direction.WRITE:
            self._saving_bytes -= frame.blob_bytes
            self.counts["skipped_busy"] += status is Status.BUSY
            store.unpin((frame,))
            self._saving.discard(move.tag)
            self.counts["skipped_no_room"] += status is Status.NO_ROOM
            if status is Status.DONE:
                self.counts["saved"] += 1
                self.counts["saved_bytes"] += frame.blob_bytes
        else:
            self._loading_bytes -= frame.blob_bytes
            del self._loading[frame.namespace, frame.key]
            store.unguard(frame)
            if status is not Status.DONE:
                store.abort((frame,))
            elif store.commit((frame,))[0]:
                self.counts["loaded"] += 1
                self.counts["loaded_bytes"] += frame.blob_bytes
                self._fresh.add(frame, self._clock() + self._policy.hold_s)
            else:
                # the cache was reset meanwhile
                status = Status.MISSING
        self._answer(move, status, move.why)

    def _answer(self, move: Move, status: Status, why: str) -> None:
        if move.is_late and status is not Status.TIMEOUT:
            # it was answered, and counted, when its deadline passed
            return
        breaker = self._breakers[move.direction]
        verb = "save" if move.direction is Direction.WRITE else "load"
        if status in (Status.ERROR, Status.TIMEOUT, Status.CORRUPT):
            self.counts[f"{verb}_{status.value}"] += 1
            if not breaker.is_open:
                logger.warning("%s of chunk %s: %s", verb, move.frame.key.hex()[:12], why)
        if status in (Status.ERROR, Status.TIMEOUT):
            breaker.failed(why)
        elif status in (Status.DONE, Status.CORRUPT):
            breaker.succeeded()
        move.handle.answer(move.at, status)

    def _is_off(self, direction: Direction) -> bool:
        return self._is_closed or self._driver.is_broken or not self._breakers[direction].allows()

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
        """Wait until something has ended, *timeout_s* seconds at the most: for steps that have nothing else to do."""
        self._driver.changed.wait(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait for everything that was asked for, and bring it to the drive; False if time ran out."""
        until_s = time.monotonic() + timeout_s
        self._start()
        while self._saving or self._loading:
            if time.monotonic() >= until_s:
                return False
            self._driver.changed.wait(0.01)
            self.poll()
        try:
            self._files.sync_now()
        except OSError as error:
            logger.warning("%s: %s", self._files.folder, error)
            return False
        return True

    def stats(self) -> dict[str, int]:
        """Return sizes in bytes, counts of what happened, and what the disk held a few seconds ago."""
        return {
            **self._held,
            **self.counts,
            "not_admitted": self._admission.refused,
            "inflight_bytes": self._saving_bytes + self._loading_bytes,
            "saves_off": int(self._breakers[Direction.WRITE].is_open),
            "loads_off": int(self._breakers[Direction.READ].is_open),
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
        self._report()
        if self._has_ended:
            self._files.close()
        return self._has_ended


def _by_tag(frames: Iterable[Frame]) -> dict[Tag, Frame]:
    return {blob_tag(frame.namespace, frame.key): frame for frame in frames}
