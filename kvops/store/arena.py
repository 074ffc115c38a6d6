"""The arena: one file in memory that holds frames, their headers and the index, mapped by every process of an engine.

Who comes first creates it, under a file lock; who comes later attaches and must want the same size. A private arena
has a name made from the engine id and loses it as soon as all are in; an arena with a path of its own rests between
engines. The layout is in format.py.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvferry.kvops.errors import ArenaBusyError, ArenaDamagedError, ArenaError, ArenaMismatchError

from . import format as fmt
from . import locks, memory
from .liveness import is_alive, own_start_time, session_digest

logger = logging.getLogger(__name__)

CREATE_TIMEOUT_S = 120.0
"""How long a second process waits for the first to reserve and format the memory."""

ALIVE_OWNER_WAIT_S = 0.25
DEAD_OWNER_WAIT_S = 5.0
"""How long a new owner waits for one that lives, or that is dead and has not let go of its lock yet."""


class Arena:
    """A mapped arena. Made by :meth:`open`.

    Attributes:
        path: its file, or None for a memfd.
        buffer: all bytes, writable. words: the same as unsigned 64-bit integers. array: the same as numpy uint8.
        address: where it is mapped in this process.
        slab_bytes, slab_count, data: geometry (format.py).
        session: digest of the session's name.

    Threads: opening, attaching and closing belong to one thread; the views may be used by all.
    """

    def __init__(self, fd: int, path: Path | None, mapping: memory.Mapping, session: str) -> None:
        self._fd = fd
        self.path = path
        self._mapping = mapping
        self.buffer = mapping.buffer
        self.words = mapping.words
        self.address = mapping.address
        self.array = np.frombuffer(mapping.buffer, dtype=np.uint8)
        self.session = session_digest(session)
        self.arena_bytes = mapping.num_bytes
        _, _, _, _, self.slab_bytes, self.slab_count, self.data, self.span_table, _ = (
            fmt.SUPERBLOCK.unpack_from(mapping.buffer, 0)
        )
        self._attach_slot: int | None = None
        self._is_owner = False
        self.is_closed = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        arena_bytes: int,
        *,
        session: str,
        populate: bool = True,
    ) -> "Arena":
        """Create the arena, or attach to the one that is there.

        Args:
            path: a file on tmpfs; None takes anonymous memory that no other process can reach.
            arena_bytes: its whole size in bytes, headers and index included; at least 16 MiB.
            session: name of the engine that the caller belongs to.
            populate: touch every page now rather than at first use.

        Raises:
            ArenaSpaceError: no room, or the file can't be made there.
            ArenaMismatchError: there is an arena of another size or format, or a file that is none.
            ArenaBusyError: another process has been creating it for two minutes.
        """
        if arena_bytes < fmt.MIN_ARENA_BYTES:
            raise ArenaMismatchError(
                f"arena_bytes must be at least {fmt.MIN_ARENA_BYTES} (16 MiB); got {arena_bytes}"
            )
        arena_bytes = fmt.round_up(arena_bytes, fmt.PAGE)
        file = None if path is None else Path(path)
        if file is None:
            fd = os.memfd_create("kvferry", os.MFD_CLOEXEC)
        else:
            fd = cls._open_and_lock(file)
        try:
            if file is not None:
                mapping = cls._create_or_check(fd, file, arena_bytes, populate)
            else:
                mapping = cls._create(fd, "memory (memfd)", arena_bytes, populate)
        except BaseException:
            # what a failed creation leaves holds nothing of anybody's, but it may hold memory
            if file is not None and os.pread(fd, len(fmt.MAGIC), 0) in (b"", fmt.MAGIC_UNFINISHED):
                file.unlink(missing_ok=True)
            os.close(fd)
            raise
        return cls(fd, file, mapping, session)

    @staticmethod
    def _open_and_lock(path: Path) -> int:
        """Open *path*, hold its CREATE lock, and make sure that it still has that name."""
        deadline = time.monotonic() + CREATE_TIMEOUT_S
        while True:
            fd = memory.open_file(path)
            waited = False
            while not locks.try_lock(fd, locks.Lock.CREATE):
                if time.monotonic() > deadline:
                    os.close(fd)
                    raise ArenaBusyError(
                        f"arena {path}: another process has been creating it for {CREATE_TIMEOUT_S:.0f} s"
                    )
                if not waited:
                    waited = True
                    logger.info("waiting for another process to create the arena %s", path)
                time.sleep(locks.POLL_S)
            try:
                same = os.path.samestat(os.fstat(fd), os.stat(path))
            except FileNotFoundError:
                same = False
            if same:
                return fd
            # the creator removed it between our open and our lock
            os.close(fd)

    @classmethod
    def _create_or_check(
        cls, fd: int, path: Path, arena_bytes: int, populate: bool
    ) -> memory.Mapping:
        size = os.fstat(fd).st_size
        head = os.pread(fd, len(fmt.MAGIC), 0)
        if head in (b"", fmt.MAGIC_UNFINISHED):
            kind = memory.file_system_of(path)
            if kind not in ("tmpfs", "ramfs", "unknown"):
                logger.warning(
                    "arena %s lies on %s, not on tmpfs: its pages will be written to disk behind our back",
                    path, kind,
                )  # fmt: skip
            mapping = cls._create(fd, str(path), arena_bytes, populate)
        elif head != fmt.MAGIC:
            raise ArenaMismatchError(
                f"arena_path must be a kvferry arena or not exist; got {path}, a file of {size} bytes that "
                f"begins with {head!r}"
            )
        else:
            check_superblock(os.pread(fd, fmt.SUPERBLOCK.size, 0), size, arena_bytes, path)
            if os.fstat(fd).st_blocks * 512 < size:
                # somebody made it sparse (a copy, say): a touched hole on a full tmpfs is a SIGBUS
                memory.allocate(fd, size, str(path))
            mapping = memory.Mapping(fd, arena_bytes, populate=populate)
        locks.try_lock(fd, locks.Lock.ATTACHED, shared=True)
        locks.unlock(fd, locks.Lock.CREATE)
        return mapping

    @staticmethod
    def _create(fd: int, where: str, arena_bytes: int, populate: bool) -> memory.Mapping:
        # says "not finished" before there is anything else, so that a dead creator's file is never taken for data
        memory.begin(fd, fmt.MAGIC_UNFINISHED, where)
        memory.allocate(fd, arena_bytes, where)
        mapping = memory.Mapping(fd, arena_bytes, populate=populate)
        slab_bytes = fmt.slab_bytes_for(arena_bytes)
        index = fmt.INDEX_SLOTS_MIN * fmt.INDEX_SLOT_BYTES
        span_table = fmt.SPAN_TABLE_OFFSET
        slab_count = arena_bytes // slab_bytes
        while True:
            first_index = span_table + fmt.round_up(slab_count * fmt.SPAN_ENTRY_BYTES, fmt.PAGE)
            data = fmt.round_up(first_index + index, fmt.PAGE)
            if data + slab_count * slab_bytes <= arena_bytes:
                break
            slab_count -= 1
        geometry = fmt.GEOMETRY.pack(
            arena_bytes, slab_bytes, slab_count, data, span_table, time.time_ns()
        )
        # a file that a dead creator left may hold anything
        mapping.buffer[8:data] = bytes(data - 8)
        mapping.buffer[16 : 16 + len(geometry)] = geometry
        mapping.words[fmt.INDEX_OFFSET_WORD] = first_index
        mapping.words[fmt.INDEX_SLOTS_WORD] = fmt.INDEX_SLOTS_MIN
        mapping.buffer[8:16] = fmt.CHECK.pack(fmt.FORMAT_VERSION) + fmt.CHECK.pack(
            fmt.check_of(geometry)
        )
        mapping.buffer[: len(fmt.MAGIC)] = fmt.MAGIC
        return mapping

    # --- who is here -------------------------------------------------------------------------------------------

    def attach(self) -> int:
        """Enter this process into the attach table, as one that reads and writes blobs; return its slot.

        A second call returns the slot of the first.

        Raises:
            ArenaBusyError: a live engine of another session owns the arena, or the table is full.
        """
        if self._attach_slot is not None:
            return self._attach_slot
        self.check_owner()
        with locks.hold(
            self._fd, locks.Lock.CREATE, timeout_s=CREATE_TIMEOUT_S, what=f"arena {self.name}"
        ):
            for slot, (pid, start, *_) in enumerate(self.attached()):
                if not is_alive(pid, start):
                    entry = (os.getpid(), own_start_time(), self.session, 0, 0, 0, 0, 0)
                    fmt.ATTACH.pack_into(self.buffer, _attach_offset(slot), *entry)
                    self.words[fmt.ATTACH_SEQUENCE_WORD] += 1
                    self._attach_slot = slot
                    return slot
        raise ArenaBusyError(f"arena {self.name}: all {fmt.ATTACH_SLOTS} attach slots are taken")

    def attached(self) -> list[tuple[int, ...]]:
        """Return the attach table: (pid, start, session, writes_begun, writes_done, reads_begun, reads_done, frames_bad)."""
        return [
            fmt.ATTACH.unpack_from(self.buffer, _attach_offset(slot))
            for slot in range(fmt.ATTACH_SLOTS)
        ]

    def bad_words(self) -> list[int]:
        """Return the indices in *words* at which the processes of this session count corrupt frames."""
        return [
            _attach_offset(slot) // 8 + fmt.ATTACH_BAD_WORD
            for slot, (pid, _, session, *_) in enumerate(self.attached())
            if pid and session == self.session
        ]

    def workers_alive(self) -> int:
        """Return how many live processes of this session are attached."""
        return sum(
            session == self.session and is_alive(pid, start)
            for pid, start, session, *_ in self.attached()
            if pid
        )

    def strangers(self) -> list[tuple[int, int]]:
        """Return (pid, start time) of live processes that may write for an earlier owner.

        Those of other sessions, and those of this one, whose name may be an old one's, that have a part in hand.
        """
        return [
            (pid, start)
            for pid, start, session, begun, done, *_ in self.attached()
            if pid and (session != self.session or begun != done) and is_alive(pid, start)
        ]

    def writes_in_flight(self) -> int:
        """Return the parts that live processes are writing at this moment."""
        return sum(
            begun - done
            for pid, start, _, begun, done, *_ in self.attached()
            if is_alive(pid, start)
        )

    def owner(self) -> tuple[int, int, int]:
        """Return (pid, start time, session) of the last owner."""
        pid, start, session = fmt.OWNER.unpack_from(self.buffer, fmt.OWNER_OFFSET)
        return pid, start, session

    def check_owner(self) -> None:
        """Refuse an arena that a live engine of another session owns.

        Raises:
            ArenaBusyError: naming the owner's pid.
        """
        if self.owner()[2] != self.session:
            self._wait_until(lambda: not locks.is_held(self._fd, locks.Lock.OWNER))

    def _wait_until(self, is_free: Callable[[], bool]) -> None:
        """Give a killed owner, which keeps its lock until the kernel has taken it apart, time to let go."""
        begin = time.monotonic()
        while not is_free():
            pid, start, _ = self.owner()
            wait_s = ALIVE_OWNER_WAIT_S if is_alive(pid, start) else DEAD_OWNER_WAIT_S
            if time.monotonic() - begin > wait_s:
                raise ArenaBusyError(
                    f"arena {self.name} is in use by another engine (pid {pid}); give this one its own arena_path"
                )
            time.sleep(locks.POLL_S)

    def take_ownership(self) -> int:
        """Become the one that writes index and headers; return the new epoch.

        Raises:
            ArenaBusyError: another live process is the owner, or this one already is.
            ArenaDamagedError: the epoch that rests in the arena can't be.
        """
        if self._is_owner:
            raise ArenaBusyError(
                f"arena {self.name} already has an open store in this process; close that first"
            )
        self._wait_until(lambda: locks.try_lock(self._fd, locks.Lock.OWNER))
        epoch = self.words[fmt.EPOCH_WORD] + 1
        if epoch >> fmt.EPOCH_BITS:
            locks.unlock(self._fd, locks.Lock.OWNER)
            raise ArenaDamagedError(
                f"arena {self.name} says that it has had {epoch} owners; delete it to start empty"
            )
        self._is_owner = True
        self.words[fmt.EPOCH_WORD] = epoch
        fmt.OWNER.pack_into(
            self.buffer, fmt.OWNER_OFFSET, os.getpid(), own_start_time(), self.session
        )
        return epoch

    def release_ownership(self) -> None:
        """Let another process own the arena; nothing happens if this one does not."""
        if self._is_owner:
            self._is_owner = False
            locks.unlock(self._fd, locks.Lock.OWNER)

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return "(memfd)" if self.path is None else str(self.path)

    @property
    def attach_word(self) -> int:
        """Index in *words* of this process's attach slot.

        Raises:
            ArenaError: :meth:`attach` has not been called.
        """
        if self._attach_slot is None:
            raise ArenaError(f"arena {self.name}: this process has not attached")
        return _attach_offset(self._attach_slot) // 8

    def unlink(self) -> None:
        """Take the file's name away: its memory lives as long as somebody maps it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the attach table, drop all locks and unmap. May be called twice."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._attach_slot is not None:
            self.buffer[
                _attach_offset(self._attach_slot) : _attach_offset(self._attach_slot) + 8
            ] = bytes(8)
        del self.array
        self._mapping.close()
        os.close(self._fd)

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _attach_offset(slot: int) -> int:
    return fmt.ATTACH_OFFSET + slot * fmt.ATTACH_BYTES


def check_superblock(head: bytes, size: int, arena_bytes: int | None, path: Path) -> None:
    """Refuse an arena that this version, or this configuration, can't use."""
    wipe = f"delete {path} to start empty"
    if len(head) < fmt.SUPERBLOCK.size:
        raise ArenaDamagedError(f"arena {path} is cut off in its superblock; {wipe}")
    _, version, check, stored_bytes, *_ = fmt.SUPERBLOCK.unpack(head)
    if version != fmt.FORMAT_VERSION:
        raise ArenaMismatchError(
            f"arena {path} has format version {version}, this kvferry reads version {fmt.FORMAT_VERSION}; "
            f"use the kvferry that wrote it, or {wipe}"
        )
    if check != fmt.check_of(head[16:64]) or stored_bytes != size:
        raise ArenaDamagedError(f"arena {path} has a damaged superblock; {wipe}")
    if arena_bytes is not None and stored_bytes != arena_bytes:
        raise ArenaMismatchError(
            f"arena_bytes must be {stored_bytes}, the size of the arena that rests in {path}; got "
            f"{arena_bytes}; change arena_bytes, or {wipe}"
        )
