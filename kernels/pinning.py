"""Make host memory that exists already reachable by the device: register it, piece by piece.

An arena is mapped first and registered afterwards, since it outlives this process and is shared with
others. One call for all of it is no option: drivers refuse a registration of 512 GiB or more, and leave
an error behind that the next kernel launch reports as its own. So it goes in pieces:

    piece 0              piece 1              piece 2
    |--------------------|--------------------|--------|      cut where no frame crosses
    registered 1st       2nd                  3rd             unregistered 3rd, 2nd, 1st

Either all pieces are registered or none is. Frames do not cross a cut, so every copy stays inside one
registration; a list of copies that merges neighbours must be told the cuts.

The calls are those of cupy's runtime. It carries a CUDA runtime of its own and clears that one's last
error whenever it raises, so a refused registration stays out of torch's way.
"""

import bisect
import mmap
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

MAX_PIECE_BYTES = 64 << 30
"""Bytes of one registration: an eighth of what the largest registration that is known to work is."""

FLAG_PORTABLE, FLAG_MAPPED, FLAG_READ_ONLY = 1, 2, 8
"""``cudaHostRegister*``: for every context of this process; with a device address; never written."""

_CAN_USE_HOST_POINTER = "cudaDevAttrCanUseHostPointerForRegisteredMem"
_SUPPORTED = "cudaDevAttrHostRegisterSupported"
_READ_ONLY_SUPPORTED = "cudaDevAttrHostRegisterReadOnlySupported"

Progress = Callable[[int, int], object]
"""Called after each piece with the bytes registered so far and the bytes in all."""


class PinningError(RuntimeError):
    """Host memory could not be registered, or unregistered.

    Attributes:
        status: the ``cudaError_t``; None if no call of CUDA was reached.
        registered: pieces (address, bytes) that could not be unregistered; empty as a rule.
        is_sticky: whether the CUDA context is lost, so that this process cannot use its device again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        registered: Sequence[tuple[int, int]] = (),
        is_sticky: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.registered = tuple(registered)
        self.is_sticky = is_sticky


class Registration:
    """Registered host memory; a context manager that unregisters it.

    Ownership:
        The memory stays the caller's: it must be mapped until :meth:`close` has returned, and no copy
        may be under way by then.

    Threads:
        One at a time.

    Attributes:
        address: of the first byte, in host and device alike.
        nbytes: of all pieces.
        pieces: (address, bytes) of each registration, in order; empty once closed.
        cuts: addresses at which two of them meet.
    """

    __slots__ = ("_runtime", "address", "cuts", "nbytes", "pieces")

    def __init__(self, runtime: Any, pieces: Sequence[tuple[int, int]]) -> None:
        self._runtime = runtime
        self.pieces = tuple(pieces)
        self.address = pieces[0][0]
        self.nbytes = sum(nbytes for _, nbytes in pieces)
        self.cuts = tuple(address for address, _ in pieces[1:])

    def close(self) -> None:
        """Unregister the pieces, last first; nothing happens the second time.

        Raises:
            PinningError: some could not be; they are still in :attr:`pieces`, the others are free.
        """
        left, error = _unregister(self._runtime, self.pieces)
        self.pieces = left
        if error is not None:
            raise PinningError(
                f"unregistering {_sizes(left)} failed: {error}; those bytes stay registered",
                status=_status(error),
                registered=left,
                is_sticky=_is_lost(self._runtime, self.address),
            ) from error

    def __enter__(self) -> "Registration":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def register(
    address: int,
    nbytes: int,
    *,
    boundaries: Sequence[int] = (),
    is_read_only: bool = False,
    piece_bytes: int = MAX_PIECE_BYTES,
    progress: Progress | None = None,
    device: int | None = None,
    runtime: Any = None,
) -> Registration:
    """Register host memory with the device, as portable and mapped.

    This takes long, about a tenth of a second per GB of memory that has pages already and more
    otherwise; call it from a thread of its own. Pages should be in place before, or they are made here.

    Args:
        address: of a mapping, a multiple of the page size.
        nbytes: its bytes, at least 1.
        boundaries: offsets in bytes, ascending, multiples of the page size, at which the memory may be
            cut: where no frame crosses. A ``range`` will do. Needed beyond *piece_bytes* only.
        is_read_only: whether the mapping is; it is then registered as such, if the device can.
        piece_bytes: the largest piece, in bytes.
        progress: called after each piece. If it raises, everything is undone, and the exception goes on.
        device: CUDA ordinal whose abilities are asked for; None: this thread's current one. The memory
            is registered for all devices that this process uses.
        runtime: what to call; None: cupy's.

    Returns:
        What unregisters it.

    Raises:
        ValueError: an argument is out of range, or *boundaries* leave a piece that is too large.
        PinningError: cupy, the driver or the device cannot; nothing stays registered, unless the
            message says so.
    """
    pieces = _cut(address, nbytes, boundaries, piece_bytes)
    cuda = _cupy_runtime() if runtime is None else runtime
    flags = _flags(cuda, device, is_read_only)
    done: list[tuple[int, int]] = []
    try:
        for piece in pieces:
            cuda.hostRegister(*piece, flags)
            done.append(piece)
            if len(done) == 1:
                _check_device_pointer(cuda, address)
            if progress is not None:
                progress(piece[0] + piece[1] - address, nbytes)
    except BaseException as error:
        left, _ = _unregister(cuda, done)
        if not isinstance(error, cuda.CUDARuntimeError | PinningError):
            raise
        what = f"registering {nbytes} bytes at {address:#x} failed"
        if len(pieces) > 1 and len(done) < len(pieces):
            what += f" at piece {len(done)} of {len(pieces)} ({_sizes(pieces[len(done) :][:1])})"
        rest = f"{_sizes(left)} could not be unregistered" if left else "nothing stays registered"
        raise PinningError(
            f"{what}: {error}; {rest}",
            status=_status(error),
            registered=left,
            is_sticky=_is_lost(cuda, address),
        ) from error
    return Registration(cuda, pieces)


def _cut(
    address: int, nbytes: int, boundaries: Sequence[int], piece_bytes: int
) -> list[tuple[int, int]]:
    """Return the pieces (address, bytes), each as large as *piece_bytes* and *boundaries* allow."""
    if address <= 0 or address % mmap.PAGESIZE:
        raise ValueError(f"address must be a positive multiple of {mmap.PAGESIZE}; got {address}")
    if nbytes < 1:
        raise ValueError(f"nbytes must be at least 1; got {nbytes}")
    if piece_bytes < mmap.PAGESIZE:
        raise ValueError(f"piece_bytes must be at least {mmap.PAGESIZE}; got {piece_bytes}")
    pieces: list[tuple[int, int]] = []
    start = 0
    while nbytes - start > piece_bytes:
        index = bisect.bisect_right(boundaries, start + piece_bytes) - 1
        end = boundaries[index] if index >= 0 else 0
        if end <= start:
            raise ValueError(
                f"boundaries must leave pieces of at most {piece_bytes} bytes; "
                f"got none in {start + 1}..{start + piece_bytes}"
            )
        # two registrations must not share a page
        if end % mmap.PAGESIZE:
            raise ValueError(f"boundaries must be multiples of {mmap.PAGESIZE}; got {end}")
        pieces.append((address + start, end - start))
        start = end
    pieces.append((address + start, nbytes - start))
    return pieces


def _cupy_runtime() -> Any:
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise PinningError(
            f"registering host memory needs cupy (the extra 'cuda'); got {error}"
        ) from error
    return runtime


def _flags(cuda: Any, device: int | None, is_read_only: bool) -> int:
    """Return the flags to register with, after asking whether the device can do it at all."""
    try:
        index = cuda.getDevice() if device is None else device

        def has(attribute: str) -> bool:
            return bool(cuda.deviceGetAttribute(getattr(cuda, attribute), index))

        for attribute in (_SUPPORTED, _CAN_USE_HOST_POINTER):
            if not has(attribute):
                raise PinningError(
                    f"device {index} cannot use host memory in place: no {attribute}"
                )
        if is_read_only and not has(_READ_ONLY_SUPPORTED):
            raise PinningError(
                f"device {index} cannot register a read-only mapping: map the memory read-write"
            )
    except cuda.CUDARuntimeError as error:
        raise PinningError(
            f"registering host memory needs a CUDA device and its driver; got {error}",
            status=_status(error),
        ) from error
    return FLAG_PORTABLE | FLAG_MAPPED | (FLAG_READ_ONLY if is_read_only else 0)


def _check_device_pointer(cuda: Any, address: int) -> None:
    """Raise unless the device sees the memory at the address that the host does."""
    pointer = cuda.pointerGetAttributes(address).devicePointer
    if pointer != address:
        raise PinningError(f"the device sees the memory at {pointer:#x}, not at the same address")


def _unregister(
    cuda: Any, pieces: Sequence[tuple[int, int]]
) -> tuple[tuple[tuple[int, int], ...], Exception | None]:
    """Unregister all *pieces*, last first; return those that could not be, and the first reason."""
    errors = [(piece, _unregister_one(cuda, piece[0])) for piece in reversed(pieces)]
    left = [(piece, error) for piece, error in errors if error is not None]
    return tuple(piece for piece, _ in reversed(left)), left[0][1] if left else None


def _unregister_one(cuda: Any, address: int) -> Exception | None:
    try:
        cuda.hostUnregister(address)
    except cuda.CUDARuntimeError as error:
        reason: Exception = error
        return reason
    return None


def _is_lost(cuda: Any, address: int) -> bool:
    """Return whether the context answers nothing any more: the question is valid for any address."""
    try:
        cuda.pointerGetAttributes(address)
    except cuda.CUDARuntimeError:
        return True
    return False


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _sizes(pieces: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{nbytes} bytes at {address:#x}" for address, nbytes in pieces)
