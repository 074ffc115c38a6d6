"""A CUDA driver library in host memory: real C entry points with the driver's signatures, real copies."""

import ctypes
import struct

import numpy as np

SUCCESS, INVALID_VALUE, INVALID_CONTEXT = 0, 1, 201
NOT_FOUND, NOT_SUPPORTED, CAPTURE = 500, 801, 900
NAMES = {
    SUCCESS: b"CUDA_SUCCESS",
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
    NOT_FOUND: b"CUDA_ERROR_NOT_FOUND",
    NOT_SUPPORTED: b"CUDA_ERROR_NOT_SUPPORTED",
    CAPTURE: b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
}
INT, SIZE, POINTER, U64 = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong


class FakeDriver:
    """What ``ctypes.CDLL("libcuda.so.1")`` would be.

    Attributes:
        memory: ranges (start, end) a copy may touch, each within one; None: anything.
        calls: one (kind, stream, count, attributes or None) per copy call.
        fail_at: number of the copy, over all calls, that fails with *fail_with*.
        fail_whole: a CUresult that every batch call returns, about no copy.
    """

    def __init__(self, *, has_lookup=True, lookup_code=SUCCESS, lookup_status=0):
        self.memory = None
        self.calls = []
        self.asked = []
        self.copied = 0
        self.fail_at = None
        self.fail_with = INVALID_VALUE
        self.fail_whole = SUCCESS
        self.lookup_code, self.lookup_status = lookup_code, lookup_status
        # spelled out once more, from cuda.h of CUDA 12.8: the code under test must agree with it
        batch = ctypes.CFUNCTYPE(
            INT, POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE, POINTER, POINTER
        )
        self._batch = batch(self._copy_batch)
        self.cuMemcpyAsync = ctypes.CFUNCTYPE(INT, U64, U64, SIZE, POINTER)(self._copy_async)
        self.cuGetErrorName = ctypes.CFUNCTYPE(INT, INT, POINTER)(self._error_name)
        if has_lookup:
            self.cuGetProcAddress_v2 = ctypes.CFUNCTYPE(
                INT, ctypes.c_char_p, POINTER, INT, ctypes.c_uint64, POINTER
            )(self._look_up)

    def _look_up(self, symbol, address, version, flags, status):
        self.asked.append((symbol, version, flags))
        INT.from_address(status).value = self.lookup_status
        if self.lookup_code == SUCCESS and not self.lookup_status:
            POINTER.from_address(address).value = ctypes.cast(self._batch, POINTER).value
        return self.lookup_code

    def _error_name(self, code, text):
        if code not in NAMES:
            return INVALID_VALUE
        ctypes.c_char_p.from_address(text).value = NAMES[code]
        return SUCCESS

    def _copy_batch(self, dsts, srcs, sizes, count, attrs, first, num_attrs, failed, stream):
        raw = struct.unpack("<iiiiiI", ctypes.string_at(attrs, 24))
        self.calls.append(("batch", stream or 0, count, raw))
        assert num_attrs == 1
        assert SIZE.from_address(first).value == 0
        if self.fail_whole:
            return self.fail_whole
        columns = [
            np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(U64)), (count,)).tolist()
            for pointer in (dsts, srcs, sizes)
        ]
        for index, (dst, src, size) in enumerate(zip(*columns, strict=True)):
            code = self._move(dst, src, size)
            if code:
                SIZE.from_address(failed).value = index
                return code
        return SUCCESS

    def _copy_async(self, dst, src, size, stream):
        self.calls.append(("one", stream or 0, 1, None))
        return self._move(dst, src, size)

    def _move(self, dst, src, size):
        if self.copied == self.fail_at:
            return self.fail_with
        if not size or not (self._is_known(dst, size) and self._is_known(src, size)):
            return INVALID_VALUE
        ctypes.memmove(dst, src, size)
        self.copied += 1
        return SUCCESS

    def _is_known(self, address, size):
        return self.memory is None or any(
            a <= address and address + size <= b for a, b in self.memory
        )
