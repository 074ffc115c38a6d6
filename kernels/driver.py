"""The two copy calls of the CUDA driver that the copy engine needs, through the driver's C interface.

torch offers neither, cupy has no batch copy, and a binding that takes Python lists pays for each
descriptor; here a batch is three addresses of arrays. Nothing is loaded when this module is imported.

The batch copy is looked up as it was first published, in CUDA 12.8, with ``failIdx``: the driver keeps
that form for good, whatever its own version.
"""

import ctypes
from collections.abc import Callable
from typing import Any

LIBRARY = "libcuda.so.1"
"""What the driver's user-space half is called; it comes with the kernel module, not with a toolkit."""

BATCH_SYMBOL, BATCH_VERSION = b"cuMemcpyBatchAsync", 12080
"""The symbol, and the CUDA version whose form of it is asked for."""

SUCCESS = 0
CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_NOT_INITIALIZED = 3
CUDA_ERROR_INVALID_CONTEXT = 201
CUDA_ERROR_ILLEGAL_ADDRESS = 700
CUDA_ERROR_NOT_SUPPORTED = 801
CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900

_HINTS = {
    CUDA_ERROR_INVALID_VALUE: "an address may belong to no tensor, or to no registered memory",
    CUDA_ERROR_NOT_INITIALIZED: "this process has not started CUDA yet",
    CUDA_ERROR_INVALID_CONTEXT: "this thread has no CUDA context: call torch.cuda.set_device in it",
    CUDA_ERROR_ILLEGAL_ADDRESS: "an earlier kernel failed; this process must be restarted",
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: "a batch copy cannot be part of a CUDA graph",
}

SOURCE_ORDER_STREAM = 1
"""Sources are read when the stream gets there, as any copy does."""
SOURCE_ORDER_ANY = 3
"""Sources may be read at any time from the call on, before work that the stream still has to do."""

FLAG_DEFAULT = 0
FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1

NO_INDEX = ctypes.c_size_t(-1).value
"""What ``failIdx`` holds when a failure is not about one copy."""

_LOOKUP_PROBLEMS = {1: "the driver does not know it", 2: "the driver is older than CUDA 12.8"}


class MemoryLocation(ctypes.Structure):
    """``CUmemLocation``: a hint that only managed memory heeds; left zero."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``: 24 bytes, how all copies of a batch are to be made."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_hint", MemoryLocation),
        ("destination_hint", MemoryLocation),
        ("flags", ctypes.c_uint),
    ]


_COPY_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int,  # CUresult
    ctypes.c_void_p,  # CUdeviceptr dsts[count]
    ctypes.c_void_p,  # CUdeviceptr srcs[count]
    ctypes.c_void_p,  # size_t sizes[count]
    ctypes.c_size_t,  # count
    ctypes.POINTER(CopyAttributes),  # attrs[numAttrs]
    ctypes.POINTER(ctypes.c_size_t),  # attrsIdxs[numAttrs]
    ctypes.c_size_t,  # numAttrs
    ctypes.POINTER(ctypes.c_size_t),  # failIdx
    ctypes.c_void_p,  # CUstream
)
_COPY_ONE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
)
_LOOKUP = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_int),
)
_ERROR_NAME = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))


class DriverError(RuntimeError):
    """A call of the CUDA driver failed, or the driver cannot be loaded.

    Attributes:
        code: the ``CUresult``; None if there is no driver to ask.
        index: which descriptor of a batch failed; None if the failure is not about one.
    """

    def __init__(self, message: str, code: int | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.index = index


class Driver:
    """The driver's entry points.

    Threads:
        Any number at once; calls let go of the interpreter lock. Copies go to the CUDA context that
        is current in the calling thread.

    Attributes:
        batch_missing: why there is no batch copy; "" if there is one.
    """

    __slots__ = ("_copy_batch", "_copy_one", "_error_name", "_library", "batch_missing")

    def __init__(self, library: Any) -> None:
        """Look the entry points up.

        Args:
            library: of :data:`LIBRARY`, as ctypes loads it.

        Raises:
            DriverError: it lacks what every driver has.
        """
        # kept, so that what the entry points point into stays mapped
        self._library = library
        try:
            self._copy_one = _typed(library.cuMemcpyAsync, _COPY_ONE)
            self._error_name = _typed(library.cuGetErrorName, _ERROR_NAME)
        except AttributeError as error:
            raise DriverError(f"{LIBRARY} must be the CUDA driver; got {error}") from error
        self._copy_batch, self.batch_missing = self._look_up_batch()

    @classmethod
    def load(cls) -> "Driver":
        """Load the driver of this machine.

        Raises:
            DriverError: there is none.
        """
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(
                f"the copy engine needs the CUDA driver ({LIBRARY}); got {error}"
            ) from error
        return cls(library)

    def _look_up_batch(self) -> tuple[Callable[..., int] | None, str]:
        try:
            lookup = _typed(self._library.cuGetProcAddress_v2, _LOOKUP)
        except AttributeError:
            return None, "the driver is older than CUDA 12.0"
        address, status = ctypes.c_void_p(), ctypes.c_int(0)
        code = lookup(BATCH_SYMBOL, ctypes.byref(address), BATCH_VERSION, 0, ctypes.byref(status))
        if code != SUCCESS:
            return None, f"looking it up failed: {self.name_of(code)}"
        if status.value or address.value is None:
            return None, _LOOKUP_PROBLEMS.get(status.value, "the driver gave no address for it")
        return _COPY_BATCH(address.value), ""

    def name_of(self, code: int) -> str:
        """Return the driver's own name of a ``CUresult``."""
        name = ctypes.c_char_p()
        if self._error_name(code, ctypes.byref(name)) != SUCCESS or not name.value:
            return f"CUresult {code}"
        return name.value.decode()

    def copy_batch(
        self,
        destinations: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: CopyAttributes,
        stream: int,
    ) -> None:
        """Enqueue *count* copies in one call; they run in no particular order.

        Args:
            destinations: address of ``[count]`` 64-bit addresses.
            sources: address of ``[count]`` 64-bit addresses.
            sizes: address of ``[count]`` 64-bit numbers of bytes, none of them 0. The three arrays
                may be reused when the call returns.
            count: at least 1.
            attributes: of all copies.
            stream: a ``CUstream``, not the legacy default one.

        Raises:
            DriverError: the driver refused. Copies before ``index`` may have been enqueued.
        """
        if self._copy_batch is None:
            raise DriverError(f"{BATCH_SYMBOL.decode()} is missing: {self.batch_missing}")
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(NO_INDEX)
        code = self._copy_batch(
            destinations, sources, sizes, count,
            ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), stream,
        )  # fmt: skip
        if code != SUCCESS:
            # a driver that has nothing to say about the index leaves SIZE_MAX, or any number
            index = failed.value if failed.value < count else None
            raise self._error(BATCH_SYMBOL.decode(), code, index)

    def copy_one(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue one copy.

        Raises:
            DriverError: the driver refused; nothing was enqueued.
        """
        code = self._copy_one(destination, source, nbytes, stream)
        if code != SUCCESS:
            raise self._error("cuMemcpyAsync", code, None)

    def _error(self, call: str, code: int, index: int | None) -> DriverError:
        hint = _HINTS.get(code)
        text = f"{call} failed: {self.name_of(code)}" + (f" ({hint})" if hint else "")
        return DriverError(text, code, index)


def _typed(function: Any, prototype: Any) -> Any:
    """Return *function*, found in a library, with the argument types of *prototype*."""
    return ctypes.cast(function, prototype)
