"""What a power cut may take: an undo log of all that was written, named or cut off, and not synced yet.

Each write is preceded by a copy of the sectors it replaces. Going back over the log, newest first, each sector is left
alone or given its older bytes: it ends as one of the versions that it had since the last sync, as on a drive that stops
at any moment and has reordered what it was given. Names go back in order, up to a point, as in the journal of a file
system.
"""

import contextlib
import dataclasses
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

SECTOR_BYTES = 512
"""What a drive writes as a whole or not at all."""


@dataclasses.dataclass(slots=True)
class Undo:
    """How to take one change of a file back.

    Attributes:
        offset, num_bytes: which bytes it changes, in whole sectors.
        old: what was there; shorter where the file ended.
        old_size: how long the file was.
        whole: taken back as one thing: a change of length.
        done: whether its submitter knows that it ended; a sync covers nothing else.
    """

    offset: int
    num_bytes: int
    old: bytes
    old_size: int
    whole: bool = False
    done: bool = False


@dataclasses.dataclass(slots=True)
class _Name:
    """A name that came (no old one), went (no new one) or changed; the file that lost its name by it, kept open."""

    old: Path | None
    new: Path | None
    lost: int = -1

    @property
    def folder(self) -> Path:
        path = self.new or self.old
        assert path is not None
        return path.parent.resolve()


class UndoLog:
    """Remembers what was not synced, and takes some of it back.

    Args:
        remembers: False for a log of nothing.

    Threads: one at a time.
    Ownership: has a descriptor open for each file that it remembers something of, until :meth:`close`.
    """

    def __init__(self, *, remembers: bool = True) -> None:
        self.remembers = remembers
        self._files: dict[tuple[int, int], tuple[int, list[Undo]]] = {}
        self._names: list[_Name] = []

    def write(self, fd: int, offset: int, num_bytes: int) -> Undo:
        """Remember what a write that follows replaces."""
        if not self.remembers:
            return Undo(offset, 0, b"", 0)
        own, undos = self._file(fd)
        start = offset - offset % SECTOR_BYTES
        length = -(-(offset + num_bytes - start) // SECTOR_BYTES) * SECTOR_BYTES
        undo = Undo(start, length, os.pread(own, length, start), os.fstat(own).st_size)
        undos.append(undo)
        return undo

    def resize(self, fd: int, num_bytes: int) -> None:
        """Remember the end that a change of length cuts off, and the length."""
        if not self.remembers:
            return
        own, undos = self._file(fd)
        size = os.fstat(own).st_size
        old = os.pread(own, max(0, size - num_bytes), num_bytes)
        undos.append(Undo(num_bytes, len(old), old, size, whole=True, done=True))

    def sync(self, fd: int) -> None:
        """Forget the changes of a file that a sync has made safe."""
        identity = _identity(fd)
        if identity in self._files:
            own, undos = self._files[identity]
            undos[:] = [undo for undo in undos if not undo.done]
            if not undos:
                os.close(own)
                del self._files[identity]

    def create(self, path: Path) -> None:
        """Remember that a name is new."""
        if self.remembers:
            self._names.append(_Name(None, path))

    @contextlib.contextmanager
    def rename(self, old: Path, new: Path) -> Iterator[None]:
        """Remember a rename that succeeds in the block of code."""
        yield from self._change(_Name(old, new, self._keep_open(new)))

    @contextlib.contextmanager
    def unlink(self, path: Path) -> Iterator[None]:
        """Remember a file that is deleted in the block of code."""
        yield from self._change(_Name(path, None, self._keep_open(path)))

    def sync_folder(self, path: Path) -> None:
        """Forget the names in a folder that a sync has made safe."""
        folder = path.resolve()
        _close(name.lost for name in self._names if name.folder == folder)
        self._names = [name for name in self._names if name.folder != folder]

    def cut(self, chance: random.Random) -> None:
        """Leave the files as a power cut could, and forget everything.

        Raises:
            ValueError: it does not remember.
        """
        if not self.remembers:
            raise ValueError("power_cuts must be True for this; got False")
        for own, undos in self._files.values():
            _take_back(own, undos, chance)
        kept = chance.randint(0, len(self._names))
        for name in reversed(self._names[kept:]):
            if name.new is not None and name.old is None:
                name.new.unlink(missing_ok=True)
            elif name.new is not None and name.old is not None:
                os.replace(name.new, name.old)
            hidden = name.new or name.old
            if name.lost >= 0 and hidden is not None:
                _copy(name.lost, hidden)
        self.close()

    def close(self) -> None:
        """Forget everything."""
        _close(own for own, _ in self._files.values())
        _close(name.lost for name in self._names)
        self._files.clear()
        self._names.clear()

    def _file(self, fd: int) -> tuple[int, list[Undo]]:
        identity = _identity(fd)
        if identity not in self._files:
            # buffered, and open for as long as there is something to take back
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            os.posix_fadvise(own, 0, 0, os.POSIX_FADV_RANDOM)
            self._files[identity] = (own, [])
        return self._files[identity]

    def _change(self, name: _Name) -> Iterator[None]:
        try:
            yield
        except BaseException:
            _close([name.lost])
            raise
        # nothing went if there was nothing
        if self.remembers and (name.new is not None or name.lost >= 0):
            self._names.append(name)

    def _keep_open(self, path: Path) -> int:
        if self.remembers:
            with contextlib.suppress(OSError):
                return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        return -1


def _take_back(own: int, undos: list[Undo], chance: random.Random) -> None:
    size = os.fstat(own).st_size
    for undo in reversed(undos):
        fate = chance.choice(("kept", "lost", "torn"))
        if fate == "kept":
            continue
        data = bytearray(undo.old.ljust(undo.num_bytes, b"\0"))
        if fate == "lost" or undo.whole or chance.random() < 0.5:
            size = undo.old_size
        if fate == "torn" and not undo.whole:
            newer = os.pread(own, undo.num_bytes, undo.offset).ljust(undo.num_bytes, b"\0")
            for at in range(0, undo.num_bytes, SECTOR_BYTES):
                if chance.random() < 0.5:
                    data[at : at + SECTOR_BYTES] = newer[at : at + SECTOR_BYTES]
        os.pwrite(own, data, undo.offset)
    os.ftruncate(own, size)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _copy(fd: int, path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    target = os.open(path, flags, 0o600)
    try:
        offset = 0
        while count := os.sendfile(target, fd, offset, 1 << 20):
            offset += count
    finally:
        os.close(target)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
