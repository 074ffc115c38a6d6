"""Registration against a CUDA runtime in host memory that fails at every call in turn."""

import mmap
import sys

import pytest

from kvferry.kernels import pinning
from kvferry.kernels.pinning import PinningError, register

PAGE = mmap.PAGESIZE
BASE = 0x7F0000000000
SUPPORTED, USE_HOST_POINTER, READ_ONLY = 99, 91, 113
REFUSED, STICKY, NO_DRIVER = 1, 700, 35


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"cudaError{status}: as told")
        self.status = status


class Pointer:
    def __init__(self, address):
        self.devicePointer = address


class FakeRuntime:
    """The part of cupy's runtime that pinning calls, under the same names.

    Attributes:
        registered: address -> bytes, in the order of registration.
        calls: (method, first argument) of each call.
        fail_at: number of the call that fails with *status*; with STICKY all later ones do too.
    """

    CUDARuntimeError = CUDARuntimeError
    cudaDevAttrHostRegisterSupported = SUPPORTED
    cudaDevAttrCanUseHostPointerForRegisteredMem = USE_HOST_POINTER
    cudaDevAttrHostRegisterReadOnlySupported = READ_ONLY

    def __init__(self, fail_at=None, status=REFUSED, lacks=(), offset=0):
        self.registered, self.flags, self.calls, self.unregistered = {}, [], [], []
        self.fail_at, self.status = fail_at, status
        self.lacks, self.offset = lacks, offset
        self.unregister_fails = ()

    def _call(self, name, argument):
        number = len(self.calls)
        self.calls.append((name, argument))
        if self.fail_at is not None:
            is_later = self.status == STICKY and number > self.fail_at
            if number == self.fail_at or is_later:
                raise CUDARuntimeError(self.status)

    def getDevice(self):
        self._call("getDevice", None)
        return 3

    def deviceGetAttribute(self, attribute, device):
        self._call("deviceGetAttribute", device)
        return int(attribute not in self.lacks)

    def hostRegister(self, address, nbytes, flags):
        self._call("hostRegister", address)
        for other, size in self.registered.items():
            if address < other + size and other < address + nbytes:
                raise CUDARuntimeError(712)
        self.registered[address] = nbytes
        self.flags.append(flags)

    def hostUnregister(self, address):
        self._call("hostUnregister", address)
        if address in self.unregister_fails:
            raise CUDARuntimeError(REFUSED)
        del self.registered[address]
        self.unregistered.append(address)

    def pointerGetAttributes(self, address):
        self._call("pointerGetAttributes", address)
        return Pointer(address + self.offset)


def pin(runtime, pages=10, **how):
    arguments = {"boundaries": range(0, pages * PAGE, 2 * PAGE), "piece_bytes": 5 * PAGE} | how
    return register(BASE, pages * PAGE, runtime=runtime, **arguments)


def test_pieces_are_as_large_as_the_boundaries_allow():
    runtime = FakeRuntime()
    with pin(runtime) as registration:
        assert runtime.registered == {
            BASE: 4 * PAGE, BASE + 4 * PAGE: 4 * PAGE, BASE + 8 * PAGE: 2 * PAGE,
        }  # fmt: skip
        assert registration.cuts == (BASE + 4 * PAGE, BASE + 8 * PAGE)
        assert (registration.address, registration.nbytes) == (BASE, 10 * PAGE)
    assert runtime.registered == {}
    assert runtime.unregistered == [BASE + 8 * PAGE, BASE + 4 * PAGE, BASE]


def test_memory_that_fits_one_piece_needs_no_boundaries_and_may_end_anywhere():
    runtime = FakeRuntime()
    registration = register(BASE, 3 * PAGE + 5, runtime=runtime)
    assert (runtime.registered, registration.cuts) == ({BASE: 3 * PAGE + 5}, ())


def test_a_tebibyte_goes_in_pieces_of_64_gib_at_most():
    runtime = FakeRuntime()
    slab = 3 << 30
    register(BASE, 1 << 40, boundaries=range(0, 1 << 40, slab), runtime=runtime)
    sizes = list(runtime.registered.values())
    assert sizes[:-1] == [63 << 30] * 16
    assert sum(sizes) == 1 << 40


def test_memory_is_portable_and_mapped_and_read_only_if_its_mapping_is():
    runtime = FakeRuntime()
    for is_read_only in (False, True):
        with pin(runtime, 1, is_read_only=is_read_only):
            pass
    assert runtime.flags == [1 | 2, 1 | 2 | 8]


def test_closing_twice_unregisters_once():
    runtime = FakeRuntime()
    registration = pin(runtime)
    registration.close()
    registration.close()
    assert len(runtime.unregistered) == 3
    assert registration.pieces == ()


def test_progress_is_told_after_each_piece():
    told = []
    pin(FakeRuntime(), progress=lambda done, total: told.append((done, total)))
    assert told == [(4 * PAGE, 10 * PAGE), (8 * PAGE, 10 * PAGE), (10 * PAGE, 10 * PAGE)]


@pytest.mark.parametrize("when", range(3))
def test_a_progress_callback_that_raises_undoes_everything(when):
    runtime = FakeRuntime()

    def stop(done, total):
        if done // (4 * PAGE) == when + 1 or done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pin(runtime, progress=stop)
    assert runtime.registered == {}
    assert len(runtime.unregistered) == when + 1


def calls_of_a_registration():
    runtime = FakeRuntime()
    pin(runtime)
    return [name for name, _ in runtime.calls]


def test_the_calls_that_may_fail_are_all_tried_below():
    names = calls_of_a_registration()
    assert names == [
        "getDevice", "deviceGetAttribute", "deviceGetAttribute",
        "hostRegister", "pointerGetAttributes", "hostRegister", "hostRegister",
    ]  # fmt: skip


@pytest.mark.parametrize("call", range(len(calls_of_a_registration())))
def test_whichever_call_fails_nothing_stays_registered(call):
    runtime = FakeRuntime(fail_at=call)
    with pytest.raises(PinningError, match="cudaError1: as told") as caught:
        pin(runtime)
    assert runtime.registered == {}
    assert (caught.value.status, caught.value.registered) == (REFUSED, ())
    assert not caught.value.is_sticky
    # the same memory can be registered afterwards
    runtime.fail_at = None
    assert len(pin(runtime).pieces) == 3


def test_the_message_says_which_bytes_and_why():
    with pytest.raises(PinningError) as caught:
        pin(FakeRuntime(fail_at=5))
    assert str(caught.value) == (
        f"registering {10 * PAGE} bytes at {BASE:#x} failed at piece 1 of 3 ({4 * PAGE} bytes at "
        f"{BASE + 4 * PAGE:#x}): cudaError1: as told; nothing stays registered"
    )


def test_a_lost_context_is_told_and_so_is_what_it_keeps():
    runtime = FakeRuntime(fail_at=6, status=STICKY)
    with pytest.raises(PinningError, match="could not be unregistered") as caught:
        pin(runtime)
    error = caught.value
    assert (error.status, error.is_sticky) == (STICKY, True)
    assert error.registered == ((BASE, 4 * PAGE), (BASE + 4 * PAGE, 4 * PAGE))
    assert dict(error.registered) == runtime.registered


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2)])
def test_a_piece_that_stays_registered_does_not_keep_the_others(which):
    runtime = FakeRuntime()
    registration = pin(runtime)
    pieces = registration.pieces
    runtime.unregister_fails = [pieces[index][0] for index in which]

    with pytest.raises(PinningError, match="those bytes stay registered") as caught:
        registration.close()

    assert caught.value.registered == registration.pieces == tuple(pieces[i] for i in which)
    assert dict(registration.pieces) == runtime.registered
    assert not caught.value.is_sticky
    runtime.unregister_fails = ()
    registration.close()
    assert runtime.registered == {}


def test_memory_that_is_registered_already_is_refused():
    runtime = FakeRuntime()
    pin(runtime, 3)
    with pytest.raises(PinningError, match="cudaError712"):
        pin(runtime, 10)
    assert runtime.registered == {BASE: 3 * PAGE}


@pytest.mark.parametrize(
    ("lacks", "how", "message"),
    [
        (SUPPORTED, {}, "device 3 cannot use host memory in place: no .*HostRegisterSupported"),
        (USE_HOST_POINTER, {}, "device 3 cannot use host memory in place: no .*CanUseHostPointer"),
        (READ_ONLY, {"is_read_only": True}, "device 3 cannot register a read-only mapping"),
        (SUPPORTED, {"device": 5}, "device 5 cannot"),
    ],
)
def test_a_device_that_cannot_is_asked_before_anything_is_registered(lacks, how, message):
    runtime = FakeRuntime(lacks=[lacks])
    with pytest.raises(PinningError, match=message):
        pin(runtime, **how)
    assert "hostRegister" not in [name for name, _ in runtime.calls]


def test_read_only_support_is_asked_for_read_only_mappings_alone():
    assert pin(FakeRuntime(lacks=[READ_ONLY])).pieces


def test_a_device_that_sees_the_memory_elsewhere_is_refused():
    runtime = FakeRuntime(offset=16)
    with pytest.raises(PinningError, match=f"the device sees the memory at {BASE + 16:#x}"):
        pin(runtime)
    assert runtime.registered == {}
    assert [name for name, _ in runtime.calls].count("hostRegister") == 1


@pytest.mark.parametrize(
    ("address", "nbytes", "how", "message"),
    [
        (0, PAGE, {}, "address must be a positive multiple of .*; got 0"),
        (BASE + 64, PAGE, {}, "address must be a positive multiple of"),
        (BASE, 0, {}, "nbytes must be at least 1; got 0"),
        (BASE, PAGE, {"piece_bytes": 5}, "piece_bytes must be at least .*; got 5"),
        (BASE, 3 * PAGE, {"piece_bytes": 2 * PAGE}, "boundaries must leave pieces of at most"),
        (
            BASE, 9 * PAGE, {"piece_bytes": 2 * PAGE, "boundaries": [2 * PAGE, 5 * PAGE]},
            f"boundaries must leave pieces .*; got none in {2 * PAGE + 1}..{4 * PAGE}",
        ),
        (
            BASE, 3 * PAGE, {"piece_bytes": 2 * PAGE, "boundaries": [PAGE + 64]},
            f"boundaries must be multiples of {PAGE}; got {PAGE + 64}",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_the_first_call(address, nbytes, how, message):
    runtime = FakeRuntime()
    with pytest.raises(ValueError, match=message):
        register(address, nbytes, runtime=runtime, **how)
    assert not runtime.calls


def test_without_cupy_there_is_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(PinningError, match=r"needs cupy \(the extra 'cuda'\); got "):
        register(BASE, PAGE)


def test_without_a_driver_there_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(pinning, "_cupy_runtime", lambda: FakeRuntime(fail_at=0, status=NO_DRIVER))
    with pytest.raises(PinningError, match="needs a CUDA device and its driver; got cudaError35"):
        register(BASE, PAGE)
