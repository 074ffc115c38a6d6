"""An engine that fails when it is told to: wrap any engine in it, and switch faults on for a block of code.

    faulty = FaultyIo(AioIo(), seed=1)
    with faulty.fault("write_error", errno=errno.ENOSPC, every=3) as fault:
        ...
    assert fault.hits == 2

The same seed and the same calls give the same faults. Nothing here sleeps: a timeout is a request, or a completion,
that is held back until :meth:`Fault.release` or the end of the block; then it arrives, late and once, as from a drive
that was stuck. With ``power_cuts``, :meth:`FaultyIo.cut_after` stops the world behind the k-th change from now, and
:meth:`FaultyIo.crash_image` leaves the files as they could be once the power is back.
"""

import collections
import ctypes
import dataclasses
import mmap
import random
import time
from collections.abc import Callable, Sequence

from .file_io import DIRECT_ALIGNMENT, Completion, Direction, FileIo, Request
from .io_engine import Bounded
from .io_fault_calls import FaultyCalls, PowerCut
from .io_fault_table import TABLE, Call, Effect, Fault
from .io_power_cut import Undo

__all__ = ["TABLE", "Call", "Effect", "Fault", "FaultyIo", "PowerCut"]

_Pieces = tuple[tuple[int, int], ...]


@dataclasses.dataclass(slots=True, eq=False)
class _Flight:
    """A request, the one that stands in for it below, and how it ended.

    Attributes:
        copy: what is written instead of the submitter's memory.
        undo: what a power cut may take back.
        due: when a slow one is delivered, by the engine's clock.
    """

    request: Request
    stand_in: Request
    fault: Fault | None
    copy: mmap.mmap | None = None
    undo: Undo | None = None
    completion: Completion | None = None
    due: float = 0.0


class FaultyIo(FaultyCalls, Bounded):
    """An engine with faults.

    Args:
        inner: the engine that does the work; closed with this one.
        seed: decides about bits and power cuts.
        power_cuts: remember what is not synced, for :meth:`crash_image`; each write then costs a read.
        clock: monotonic seconds, for "slow".

    Attributes:
        counts: calls by kind (see :class:`Call`), and "read_bytes" and "write_bytes" of all reads and writes.
        changes: writes, and calls on files that change something, so far; what :meth:`cut_after` counts.
        open_files: by descriptor.

    Threads: as any engine; faults may be switched from any thread.
    """

    def __init__(
        self,
        inner: FileIo,
        *,
        seed: int = 0,
        power_cuts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        FaultyCalls.__init__(self, inner, seed, power_cuts, clock)
        Bounded.__init__(self, inner.depth, inner.max_inflight_bytes)
        self.name = f"faulty {inner.name}"
        self._to_start: collections.deque[_Flight] = collections.deque()
        self._delayed: list[_Flight] = []
        self._ended: list[_Flight] = []
        self._woken = False

    def submit(self, requests: Sequence[Request]) -> int:
        """Take the leading requests, see :meth:`FileIo.submit`."""
        with self._lock:
            whole = self._draw(Call("submit"))
            if whole and whole.switch.effect is Effect.LIMIT:
                requests, whole = requests[: whole.limit], None
            taken = self._admit(requests)
            batches: dict[str, Fault | None] = {}
            for request in requests[:taken]:
                kind, size = request.direction.value, request.num_bytes
                where = (self.open_files.get(request.fd), request.offset, size)
                if kind not in batches:
                    batches[kind] = self._meet(Call(f"batch_{kind}", *where))
                one = self._meet(Call(kind, *where))
                self.counts[kind] += 1
                self.counts[f"{kind}_bytes"] += size
                self._begin(request, one or batches[kind] or whole)
            self._start()
            return taken

    def reap(self, timeout_s: float) -> list[Completion]:
        """Return what has ended, see :meth:`FileIo.reap`."""
        with self._lock:
            # a fault of an idle reap would be spent on nothing
            self._check_power()
            fault = self._draw(Call("reap")) if self._count else None
        if fault and fault.switch.effect is Effect.IDLE:
            return []
        deadline = time.monotonic() + timeout_s
        self._step(timeout_s, fault)
        while not (self._ended or self._woken or self._is_cut or self.closed):
            if (left := deadline - time.monotonic()) <= 0:
                break
            self._step(left, fault)
        with self._lock:
            self._check_power()
            self._woken = False
            ended, self._ended = self._ended, []
            for flight in ended:
                self._forget(flight.request)
                if flight.undo:
                    flight.undo.done = True
            return [flight.completion for flight in ended if flight.completion]

    def wake(self) -> None:
        """Make :meth:`reap` return at once."""
        self._woken = True
        self.inner.wake()

    def close(self, timeout_s: float) -> bool:
        """End this engine and the one below; False while something is in flight, or held back by a fault."""
        self.closed = True
        deadline = time.monotonic() + timeout_s
        while not self._is_cut and self._count > len(self._ended):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._step(left, None)
        if not self.inner.close(max(0.0, deadline - time.monotonic())):
            return False
        if not self._is_cut:
            self._log.close()
        return True

    def crash_image(self, timeout_s: float = 10.0) -> None:
        """Cut the power, and lose or tear what was not synced: writes by the sector, names in order.

        Call it when no thread uses this engine any more, with the memory of what is in flight still there. Files that
        were left open are closed, as when a process dies; :meth:`close` is still to be called.
        """
        with self._lock:
            self._is_cut = True
        deadline = time.monotonic() + timeout_s
        while self.inner.in_flight:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.inner.in_flight} requests did not end")
            self.inner.reap(0.1)
        self._log.cut(self._chance)
        for fd in list(self.open_files):
            self.close_file(fd)

    def _begin(self, request: Request, fault: Fault | None) -> None:
        request.submitted_s = time.monotonic()
        stand_in = Request(request.direction, request.fd, request.offset, request.pieces)
        flight = _Flight(request, stand_in, fault)
        stand_in.owner = flight
        effect = fault.switch.effect if fault else None
        if fault and effect is Effect.HOLD:
            fault.held.append(flight)
        elif fault and effect is Effect.REFUSE:
            flight.completion = Completion(request, 0, fault.errno)
            self._ended.append(flight)
        else:
            if effect is Effect.SHORT:
                stand_in.pieces = _first_half(request)
            elif effect is Effect.FLIP and request.direction is Direction.WRITE:
                flight.copy, stand_in.pieces = _copy(request)
                _flip_bit(stand_in.pieces, self._chance)
            self._to_start.append(flight)

    def _start(self) -> None:
        while self._to_start and not self._is_cut:
            flight = self._to_start[0]
            below = flight.stand_in
            is_write = below.direction is Direction.WRITE
            try:
                if is_write and not flight.undo:
                    flight.undo = self._log.write(below.fd, below.offset, below.num_bytes)
                if not self.inner.submit([below]):
                    return
            except OSError as error:
                flight.completion = Completion(flight.request, 0, error.errno or 0)
                self._ended.append(flight)
            else:
                if is_write:
                    self._changed()
            self._to_start.popleft()

    def _step(self, timeout_s: float, fault: Fault | None) -> None:
        """Hand on what waits to be started, and take in what has ended; wait for it if there is nothing else."""
        with self._lock:
            self._start()
            now = self._clock()
            self._ended += [flight for flight in self._delayed if flight.due <= now]
            self._delayed = [flight for flight in self._delayed if flight.due > now]
            waits = [timeout_s, *(flight.due - now for flight in self._delayed)]
            timeout_s = 0.0 if self._ended else max(0.0, min(waits))
        for completion in self.inner.reap(timeout_s):
            with self._lock:
                self._end(completion, fault)

    def _end(self, completion: Completion, reap_fault: Fault | None) -> None:
        flight = completion.request.owner
        assert isinstance(flight, _Flight)
        fault, request = flight.fault, flight.request
        effect = fault.switch.effect if fault else None
        count, number = completion.count, completion.errno
        if fault and effect is Effect.SPOIL:
            count, number = 0, fault.errno
        elif effect is Effect.FLIP and request.direction is Direction.READ and count:
            _flip_bit(request.pieces, self._chance)
        request.done_s = completion.request.done_s
        flight.copy = None
        flight.completion = Completion(request, count, number)
        holder = reap_fault or (fault if effect is Effect.WITHHOLD else None)
        if holder and holder.is_on:
            holder.held.append(flight)
        elif fault and fault.is_on and effect is Effect.DELAY:
            flight.due = self._clock() + fault.seconds
            self._delayed.append(flight)
        else:
            self._ended.append(flight)

    def _let_go(self, fault: Fault) -> None:
        with self._lock:
            held, fault.held = fault.held, []
            self._to_start += [flight for flight in held if not flight.completion]
            self._ended += [flight for flight in held if flight.completion]
            for flight in self._delayed:
                if flight.fault is fault:
                    flight.due = self._clock()
        self.inner.wake()


def _first_half(request: Request) -> _Pieces:
    left = request.num_bytes // 2 // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    pieces: list[tuple[int, int]] = []
    for address, size in request.pieces:
        pieces.append((address, min(size, left)))
        left -= min(size, left)
    return tuple(pieces)


def _copy(request: Request) -> tuple[mmap.mmap, _Pieces]:
    memory = mmap.mmap(-1, max(1, request.num_bytes))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    at = address
    for source, size in request.pieces:
        ctypes.memmove(at, source, size)
        at += size
    return memory, ((address, request.num_bytes),)


def _flip_bit(pieces: _Pieces, chance: random.Random) -> None:
    at = chance.randrange(max(1, sum(size for _, size in pieces)))
    for address, size in pieces:
        if at < size:
            ctypes.c_uint8.from_address(address + at).value ^= 1 << chance.randrange(8)
            return
        at -= size
