"""An engine on Linux native AIO: one thread keeps a whole queue of transfers in the kernel.

    submit --> iocb + iovecs --> io_submit --> the drive --> eventfd --> reap --> io_getevents
                                                                ^
                                                      wake (a second eventfd)

Only direct files are asynchronous: with a buffered one, io_submit does the transfer before it returns. The system
calls have no wrapper in libc, so they are called by number.
"""

import ctypes
import errno
import os
import platform
import select
import struct
import threading
import time
from collections.abc import Sequence

from .file_io import Completion, Direction, Request
from .io_engine import Engine, Iovecs, goes_on, transfer

NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents and io_submit, by machine."""

IOCB = struct.Struct("=QIIHhIQQqQII")
"""struct iocb: data, key, rw_flags, opcode, priority, fd, iovecs, number of iovecs, offset, -, flags, eventfd."""

IO_EVENT = struct.Struct("=QQqq")
"""struct io_event: data, iocb, result (bytes, or minus an error number), -."""

PREADV, PWRITEV = 7, 8
"""Operations: IOCB_CMD_PREADV and IOCB_CMD_PWRITEV."""

NOTIFY_EVENTFD = 1
"""IOCB_FLAG_RESFD: count the completion in an eventfd."""

_POINTER = struct.Struct("=Q")

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
# keeps the interpreter lock: to ask without waiting takes less than to hand the lock over and fight for it
_syscall_locked = ctypes.PyDLL(None, use_errno=True).syscall
_syscall_locked.restype = ctypes.c_long


class AioIo(Engine):
    """Transfers queued in the kernel.

    Args:
        depth: requests in flight at the most.
        max_inflight_bytes: bytes in flight at the most; a single request that is larger goes alone.

    Raises:
        OSError: there is no AIO here: not built in or another machine (ENOSYS), forbidden (EPERM), or all of it is
            in use (EAGAIN).

    Threads: one submits and reaps; calls on files and :meth:`wake` from any.
    """

    name = "aio"

    def __init__(self, depth: int = 32, max_inflight_bytes: int = 256 << 20) -> None:
        super().__init__(depth, max_inflight_bytes)
        setup, self._destroy_number, getevents, submit = _numbers(platform.machine())
        self._context = _set_up(setup, depth)
        self._requests: list[Request | None] = [None] * depth
        self._free = list(range(depth - 1, -1, -1))
        self._iovecs = [Iovecs() for _ in range(depth)]
        self._iocbs = (ctypes.c_char * (IOCB.size * depth))()
        self._iocbs_address = ctypes.addressof(self._iocbs)
        self._pointers = (ctypes.c_char * (_POINTER.size * depth))()
        self._pointers_address = ctypes.addressof(self._pointers)
        self._events = (ctypes.c_char * (IO_EVENT.size * depth))()
        self._no_wait = (ctypes.c_long * 2)(0, 0)
        # made once: ctypes would convert them at each call
        self._submit_args = (ctypes.c_long(submit), self._context)
        self._reap_args = (
            *(ctypes.c_long(getevents), self._context, ctypes.c_long(0), ctypes.c_long(depth)),
            *(ctypes.byref(self._events), ctypes.byref(self._no_wait)),
        )
        # ended, and not in the kernel's ring: refused at once, or collected by close
        self._ready: list[Completion] = []
        self._notice = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # wake may come from any thread, and must not write into whatever took the number of a closed eventfd
        self._wake_lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._notice, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def submit(self, requests: Sequence[Request]) -> int:
        """Take the leading requests, see :meth:`FileIo.submit`.

        Raises:
            OSError: the engine is closed, or the kernel has no room though nothing is in flight (EAGAIN).
        """
        admitted = self._admit(requests)
        now = time.monotonic()
        slots = [self._describe(requests[number], number, now) for number in range(admitted)]
        taken = 0
        while taken < admitted:
            # the kernel stops before the first one that it refuses, and says why when that one leads
            done = _syscall(
                *self._submit_args,
                ctypes.c_long(admitted - taken),
                ctypes.c_void_p(self._pointers_address + taken * _POINTER.size),
            )
            if done > 0:
                taken += done
                continue
            number = ctypes.get_errno()
            if number == errno.EAGAIN:
                break
            if number != errno.EINTR:
                request = self._release(slots[taken])
                request.done_s = now
                self._ready.append(Completion(request, 0, number))
                taken += 1
        for slot in slots[taken:]:
            self._forget(self._release(slot))
        if taken < admitted and self._count == 0:
            raise OSError(errno.EAGAIN, "the kernel takes no I/O requests")
        return taken

    def reap(self, timeout_s: float) -> list[Completion]:
        """Return what has ended, see :meth:`FileIo.reap`."""
        completions = self._collect()
        deadline = time.monotonic() + timeout_s
        woken = self.closed
        while not completions and not woken and (left := deadline - time.monotonic()) > 0:
            woken = self._wait(left)
            completions = self._collect()
        for completion in completions:
            self._forget(completion.request)
        return completions

    def wake(self) -> None:
        """Make :meth:`reap` return at once."""
        with self._wake_lock:
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

    def close(self, timeout_s: float) -> bool:
        """Take nothing more, and wait for what is in flight; it can still be reaped afterwards.

        Returns:
            False if requests are still in the kernel; call it again to wait longer.
        """
        self.closed = True
        deadline = time.monotonic() + timeout_s
        self._ready = self._collect()
        while self._in_kernel and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
            self._ready = self._collect()
        if self._in_kernel:
            return False
        with self._wake_lock:
            if self._woken >= 0:
                _syscall(ctypes.c_long(self._destroy_number), self._context)
                os.close(self._notice)
                os.close(self._woken)
                self._woken = -1
        return True

    @property
    def _in_kernel(self) -> int:
        return self.depth - len(self._free)

    def _describe(self, request: Request, number: int, now: float) -> int:
        slot = self._free.pop()
        self._requests[slot] = request
        request.submitted_s = now
        iovecs = self._iovecs[slot]
        IOCB.pack_into(
            self._iocbs, slot * IOCB.size,
            slot, 0, 0, PREADV if request.direction is Direction.READ else PWRITEV, 0, request.fd & 0xFFFFFFFF,
            iovecs.address, iovecs.fill(request.pieces), request.offset, 0, NOTIFY_EVENTFD, self._notice,
        )  # fmt: skip
        pointer = self._iocbs_address + slot * IOCB.size
        _POINTER.pack_into(self._pointers, number * _POINTER.size, pointer)
        return slot

    def _release(self, slot: int) -> Request:
        request = self._requests[slot]
        assert request is not None
        self._requests[slot] = None
        self._free.append(slot)
        return request

    def _collect(self) -> list[Completion]:
        """Return what has ended without waiting; it still counts as in flight."""
        completions, self._ready = self._ready, []
        if not self._in_kernel:
            return completions
        count = _syscall_locked(*self._reap_args)
        if count < 0:
            if (number := ctypes.get_errno()) != errno.EINTR:
                self._ready = completions
                raise OSError(number, os.strerror(number))
            return completions
        now = time.monotonic()
        ended = memoryview(self._events)[: count * IO_EVENT.size]
        for slot, _, result, _ in IO_EVENT.iter_unpack(ended):
            request = self._release(slot)
            moved, number = (result, 0) if result >= 0 else (0, -result)
            if number == errno.EINTR or goes_on(request, moved, moved):
                # rare, and most often the end of the file: not worth another trip through the queue
                moved, number = transfer(request, self._iovecs[slot], moved)
            request.done_s = now
            completions.append(Completion(request, moved, number))
        return completions

    def _wait(self, timeout_s: float) -> bool:
        """Wait for a completion or a wake; return whether it was a wake."""
        woken = False
        for eventfd, _ in self._poll.poll(timeout_s * 1000):
            woken = woken or eventfd == self._woken
            try:
                os.eventfd_read(eventfd)
            except BlockingIOError:
                continue
        return woken


def _numbers(machine: str) -> tuple[int, int, int, int]:
    if machine not in NUMBERS:
        raise OSError(
            errno.ENOSYS,
            f"Linux AIO is known here on {' and '.join(NUMBERS)}; got {machine}: use threads",
        )
    return NUMBERS[machine]


def _set_up(number: int, depth: int) -> ctypes.c_ulong:
    context = ctypes.c_ulong(0)
    if _syscall(ctypes.c_long(number), ctypes.c_long(depth), ctypes.byref(context)) == 0:
        return context
    error = ctypes.get_errno()
    reasons = {
        errno.EAGAIN: "all of fs.aio-max-nr is in use",
        errno.ENOSYS: "this kernel has no AIO",
        errno.EPERM: "a sandbox forbids it",
    }
    reason = reasons.get(error, os.strerror(error))
    raise OSError(error, f"Linux AIO could not be set up for {depth} requests: {reason}")
