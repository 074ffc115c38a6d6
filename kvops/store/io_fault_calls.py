"""The half of a faulty engine that does not queue: switching faults on, cutting the power, and the calls on files."""

import collections
import contextlib
import difflib
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from .file_io import FileIo
from .io_fault_table import TABLE, Call, Effect, Fault
from .io_power_cut import UndoLog


class PowerCut(Exception):
    """The power is off: nothing reaches the disk through this engine any more."""


class FaultyCalls:
    """Faults, and calls on files that meet them, see :class:`FaultyIo`."""

    def __init__(
        self, inner: FileIo, seed: int, power_cuts: bool, clock: Callable[[], float]
    ) -> None:
        self.inner = inner
        self.counts: collections.Counter[str] = collections.Counter()
        self.changes = 0
        self.open_files: dict[int, Path] = {}
        self._chance = random.Random(seed)
        self._clock = clock
        self._log = UndoLog(remembers=power_cuts)
        self._cut_at: int | None = None
        self._is_cut = False
        self._faults: list[Fault] = []
        # guards all of an engine's state, and is held in the calls on files; not while reap waits
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def fault(
        self,
        name: str,
        *,
        errno: int = 0,
        match: Callable[[Call], bool] = lambda call: True,
        every: int = 1,
        count: int | None = None,
        limit: int = 1,
        seconds: float = 0.05,
    ) -> Iterator[Fault]:
        """Have a fault within a block of code. Of several, the first that applies is taken.

        Args:
            name: a key of :data:`TABLE`.
            errno: instead of the table's error number.
            match: which calls it may meet; all.
            every: only each so-manieth of them.
            count: how often it happens at the most; None for ever.
            limit: for "aio_submit_partial", how many requests are taken.
            seconds: for "slow".
        """
        if name not in TABLE:
            near = difflib.get_close_matches(name, TABLE, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"name must be one of the {len(TABLE)} in TABLE; got {name!r}{hint}")
        switch = TABLE[name]
        number = errno or switch.errno
        fault = Fault(switch, number, match, every, count, limit, seconds, self._let_go)
        with self._lock:
            self._faults.append(fault)
        try:
            yield fault
        finally:
            with self._lock:
                self._faults.remove(fault)
                fault.is_on = False
            self._let_go(fault)

    def cut_after(self, changes: int) -> None:
        """Cut the power when *changes* more of them have been made; 0 for now."""
        with self._lock:
            self._cut_at = self.changes + changes
            self._cut_if_due()

    def open(self, path: Path, *, write: bool, create: bool = False, direct: bool = True) -> int:
        """Open a file, see :meth:`FileIo.open`."""
        with self._call("open", path, changes=create):
            fd = self.inner.open(path, write=write, create=create, direct=direct)
            self.open_files[fd] = path
            if create:
                self._log.create(path)
            return fd

    def close_file(self, fd: int) -> None:
        """Close a descriptor; also without power, when it may be closed already."""
        with self._lock:
            if self.open_files.pop(fd, None) or not self._is_cut:
                self.inner.close_file(fd)

    def read_now(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """Read at once, see :meth:`FileIo.read_now`."""
        with self._call("read_now", fd, offset, num_bytes, changes=False) as fault:
            self.counts["read_bytes"] += num_bytes
            data = self.inner.read_now(fd, num_bytes, offset)
            return self._flipped(data) if fault else data

    def write_now(self, fd: int, data: bytes, offset: int) -> None:
        """Write at once, see :meth:`FileIo.write_now`."""
        with self._call("write_now", fd, offset, len(data)) as fault:
            self.counts["write_bytes"] += len(data)
            undo = self._log.write(fd, offset, len(data))
            # also after an error it has ended
            undo.done = True
            self.inner.write_now(fd, self._flipped(data) if fault else data, offset)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Reserve space, see :meth:`FileIo.allocate`."""
        with self._call("allocate", fd, 0, num_bytes):
            self._log.resize(fd, max(num_bytes, os.fstat(fd).st_size))
            self.inner.allocate(fd, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Make a file exactly that long."""
        with self._call("truncate", fd, 0, num_bytes):
            self._log.resize(fd, num_bytes)
            self.inner.truncate(fd, num_bytes)

    def sync(self, fd: int) -> None:
        """Make a file safe, see :meth:`FileIo.sync`."""
        with self._call("sync", fd):
            self.inner.sync(fd)
            self._log.sync(fd)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder safe."""
        with self._call("sync_folder", path):
            self.inner.sync_folder(path)
            self._log.sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name."""
        with self._call("rename", new), self._log.rename(old, new):
            self.inner.rename(old, new)

    def unlink(self, path: Path) -> None:
        """Delete a file."""
        with self._call("unlink", path), self._log.unlink(path):
            self.inner.unlink(path)

    @contextlib.contextmanager
    def _call(
        self, kind: str, file: Path | int, offset: int = 0, size: int = 0, *, changes: bool = True
    ) -> Iterator[Fault | None]:
        path = self.open_files.get(file) if isinstance(file, int) else file
        with self._lock:
            self.counts[kind] += 1
            yield self._draw(Call(kind, path, offset, size))
            if changes:
                self._changed()

    def _check_power(self) -> None:
        if self._is_cut:
            raise PowerCut(f"the power was cut after change {self.changes}")

    def _meet(self, call: Call) -> Fault | None:
        return next((fault for fault in self._faults if fault.meets(call)), None)

    def _draw(self, call: Call) -> Fault | None:
        """Return the fault that this call meets, or raise what it makes of the call."""
        self._check_power()
        fault = self._meet(call)
        # what has a number and can't be held back in a queue fails
        if fault and fault.errno and fault.switch.effect in (Effect.REFUSE, Effect.HOLD):
            raise OSError(fault.errno, os.strerror(fault.errno))
        return fault

    def _changed(self) -> None:
        self.changes += 1
        self._cut_if_due()

    def _cut_if_due(self) -> None:
        if self._cut_at is not None and self.changes >= self._cut_at:
            self._is_cut = True
            self.inner.wake()

    def _let_go(self, fault: Fault) -> None:
        """Let go on what a fault has held back."""
        raise NotImplementedError

    def _flipped(self, data: bytes) -> bytes:
        if not data:
            return data
        changed = bytearray(data)
        changed[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
        return bytes(changed)
