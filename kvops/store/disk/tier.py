"""The disk below the arena: which chunks go down, which come up, and what is said when the disk doesn't answer.

The store's one thread asks and polls; the driver's thread moves (driver.py). Nothing here waits for a drive.

    save   frame pinned   -> place reserved  -> written, published                      -> unpinned
    load   place held     -> frame reserved  -> read, key and checksums compared        -> committed, or aborted

A frame under way is not evicted, and one that is being loaded is not readable, whatever happens around them; both stay
the tier's until the drive has let go, also past a deadline and through a reset.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from kvferry.kvops.store.file_io import Direction, FileIo
from kvferry.kvops.store.frame import Frame
from kvferry.kvops.store.store import Reserve, Store

from . import last_run
from .admission import Doorkeeper, Policy
from .breaker import Breaker
from .driver import Driver
from .files import BlobFiles
from .format import blob_tag
from .jobs import Handle, Move, Status

logger = logging.getLogger(__name__)

PRESSURE = 0.1
"""Share of free memory in the arena below which "pressure" saves what would go next."""

PRESSURE_BATCH = 64
"""Frames looked at in one step under pressure."""

_RESERVED = {
    Reserve.EXISTS: Status.EXISTS,
    Reserve.PENDING: Status.PENDING,
    Reserve.NO_ROOM: Status.NO_ROOM,
}


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
        self._doorkeeper = Doorkeeper()
        self._breakers = {
            direction: Breaker(f"{verb} {files.folder}", clock)
            for direction, verb in (
                (Direction.WRITE, "saving to"),
                (Direction.READ, "loading from"),
            )
        }
        self._inflight_bytes = 0
        self._saving: set[tuple[int, int]] = set()
        self._loading: dict[tuple[bytes, bytes], Move] = {}
        self._fresh: dict[Frame, float] = {}
        self._is_closed = self._has_ended = False
        self._held = files.stats()
        self.counts = dict.fromkeys(
            ("saved", "saved_bytes", "loaded", "loaded_bytes", "not_admitted", "skipped_busy", "skipped_off",
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
        if self._policy.write == "commit":
            self._save_admitted(frames)
        elif self._policy.admission == "reused":
            for frame in frames:
                self._doorkeeper.knows(blob_tag(frame.namespace, frame.key))

    def used(self, frames: Iterable[Frame]) -> None:
        """Note chunks that were hit in memory: what is reused is worth a write, if it has none yet."""
        if self._policy.admission == "reused":
            self._save_admitted(frames)

    def _save_admitted(self, frames: Iterable[Frame]) -> None:
        wanted = []
        for frame in frames:
            tag = blob_tag(frame.namespace, frame.key)
            if self._policy.admission == "all" or self._doorkeeper.knows(tag):
                if not self._files.contains(tag):
                    wanted.append(frame)
            else:
                self.counts["not_admitted"] += 1
        if wanted:
            self._save(wanted, Handle([frame.key for frame in wanted]))

    def _relieve(self) -> None:
        """Under pressure: save what would be evicted next."""
        if self._store.free_share() < PRESSURE:
            self._save_admitted(f for f in self._store.coldest(PRESSURE_BATCH) if f.is_ready)

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
            if (
                frame is not None
                and frame.is_ready
                and self._store.arena.words[frame.word] == frame.ready
            ):
                frames.append(frame)
            else:
                frames.append(None)
                handle.answer(at, Status.MISSING)
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
            if (
                self._inflight_bytes + frame.blob_bytes > self._policy.max_inflight_bytes
                and self._inflight_bytes
            ):
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
            self._store.pin((frame,))
            self._saving.add(tag)
            self._inflight_bytes += frame.blob_bytes
            moves.append(
                Move(Direction.WRITE, frame, tag, handle, at, asked, now + self._policy.timeout_s)
            )
        if moves:
            self._driver.ask(moves)

    # --- coming up ---------------------------------------------------------------------------------------------

    def load(
        self, keys: Sequence[bytes], *, tokens: int = 0, wait: bool = False, timeout_s: float = 60.0
    ) -> Handle:
        """Bring chunks into memory. A chunk is readable when its answer is DONE, which :meth:`poll` gives.

        Args:
            keys: of the store's namespace.
            tokens: tokens of a chunk, for the frame header.
            wait: return when all is answered.
            timeout_s: or after so many seconds.

        Returns:
            Answers in request order.
        """
        handle = Handle(keys)
        moves: list[Move] = []
        now = self._clock()
        allowed = not self._is_off(Direction.READ)
        for at, key in enumerate(keys):
            move_or_status = (
                self._begin_load(key, tokens, handle, at, now) if allowed else Status.OFF
            )
            if isinstance(move_or_status, Status):
                handle.answer(at, move_or_status)
            else:
                moves.append(move_or_status)
        if moves:
            self._driver.ask(moves)
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
        fresh = sum(frame.blob_bytes for frame in self._fresh)
        if self._inflight_bytes and self._inflight_bytes + fresh + blob_bytes > room:
            return Status.BUSY
        (answer,) = store.reserve([key], blob_bytes, tokens=tokens)
        if not isinstance(answer, Frame):
            return _RESERVED[answer]
        store.guard(answer)
        self._inflight_bytes += blob_bytes
        until_s = now + self._policy.timeout_s
        move = Move(Direction.READ, answer, tag, handle, at, time.monotonic(), until_s)
        self._loading[store.namespace, key] = move
        return move

    def claimed(self, frames: Iterable[Frame]) -> None:
        """Note that somebody reads chunks that were loaded ahead: his lease keeps them now."""
        if self._fresh:
            mine = [frame for frame in frames if self._fresh.pop(frame, None) is not None]
            self._store.unpin(mine)

    # --- each step ---------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what has ended; call it once a step. Never waits."""
        driver, now = self._driver, self._clock()
        driver.changed.clear()
        while driver.late:
            move = driver.late.popleft()
            self._answer(move, Status.TIMEOUT, "no answer in time")
        while driver.ended:
            self._take_back(driver.ended.popleft())
        if self._fresh:
            stale = [frame for frame, until_s in self._fresh.items() if until_s <= now]
            for frame in stale:
                del self._fresh[frame]
            self._store.unpin(stale)
        if self._policy.write == "pressure":
            self._relieve()

    def _take_back(self, move: Move) -> None:
        store, frame = self._store, move.frame
        self._inflight_bytes -= frame.blob_bytes
        status = move.status
        if move.direction is Direction.WRITE:
            store.unpin((frame,))
            self._saving.discard(move.tag)
            self.counts["skipped_no_room"] += status is Status.NO_ROOM
            if status is Status.DONE:
                self.counts["saved"] += 1
                self.counts["saved_bytes"] += frame.blob_bytes
        else:
            self._loading.pop((frame.namespace, frame.key), None)
            store.unguard(frame)
            if status is not Status.DONE:
                store.abort((frame,))
            elif store.commit((frame,))[0]:
                self.counts["loaded"] += 1
                self.counts["loaded_bytes"] += frame.blob_bytes
                store.pin((frame,))
                self._fresh[frame] = self._clock() + self._policy.hold_s
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
        while self._inflight_bytes:
            self.poll()
            if time.monotonic() >= until_s:
                return False
            if self._inflight_bytes:
                self._driver.changed.wait(0.01)
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
            "inflight_bytes": self._inflight_bytes,
            "saves_off": int(self._breakers[Direction.WRITE].is_open),
            "loads_off": int(self._breakers[Direction.READ].is_open),
        }

    def stages(self) -> dict[str, dict[str, float]]:
        """Return the stage timers: queue, io, checksum, publish."""
        return self._driver.stages.snapshot()

    def _report(self) -> None:
        """Leave figures in the folder, from the driver's thread; a disk that can't take them is noticed elsewhere."""
        self._held = self._files.stats()
        try:
            last_run.write(self._files.folder, self.stats(), self.stages())
        except OSError as error:
            logger.debug("%s: %s", last_run.NAME, error)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Finish what is under way and let go of the folder; False if a drive still holds memory of the arena."""
        if self._is_closed:
            return self._has_ended
        self.flush(timeout_s / 2)
        self._is_closed = True
        ended = self._has_ended = self._driver.close(timeout_s / 2)
        self.poll()
        for frame in self._fresh:
            self._store.unpin((frame,))
        self._fresh.clear()
        self._report()
        if ended:
            self._io.close(timeout_s)
            self._files.close()
        return ended
