import ctypes

import pytest

from kvferry.kernels.driver import CopyAttributes, Driver, DriverError

from .fake_driver import INVALID_CONTEXT, NOT_FOUND, SUCCESS, FakeDriver


def test_the_attributes_of_a_batch_are_the_24_bytes_of_cuda_h():
    offsets = {name: getattr(CopyAttributes, name).offset for name, _ in CopyAttributes._fields_}
    assert offsets == {"source_order": 0, "source_hint": 4, "destination_hint": 12, "flags": 20}
    assert ctypes.sizeof(CopyAttributes) == 24


def test_the_batch_copy_is_asked_for_as_of_cuda_12_8():
    library = FakeDriver()
    assert Driver(library).batch_missing == ""
    assert library.asked == [(b"cuMemcpyBatchAsync", 12080, 0)]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"has_lookup": False}, "the driver is older than CUDA 12.0"),
        ({"lookup_status": 1}, "the driver does not know it"),
        ({"lookup_status": 2}, "the driver is older than CUDA 12.8"),
        ({"lookup_code": NOT_FOUND}, "looking it up failed: CUDA_ERROR_NOT_FOUND"),
    ],
)
def test_a_driver_without_it_says_why(how, why):
    driver = Driver(FakeDriver(**how))
    assert driver.batch_missing == why
    with pytest.raises(DriverError, match=f"cuMemcpyBatchAsync is missing: {why}"):
        driver.copy_batch(16, 16, 16, 1, CopyAttributes(), 7)


def test_a_lookup_that_gives_no_address_is_no_batch_copy():
    library = FakeDriver()
    library.cuGetProcAddress_v2 = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
    )(lambda *_: SUCCESS)
    assert Driver(library).batch_missing == "the driver gave no address for it"


def test_an_error_has_the_name_that_the_driver_gives_it():
    driver = Driver(FakeDriver())
    assert driver.name_of(INVALID_CONTEXT) == "CUDA_ERROR_INVALID_CONTEXT"
    assert driver.name_of(12345) == "CUresult 12345"


def test_a_library_that_is_no_driver_is_refused():
    with pytest.raises(
        DriverError, match=r"libcuda.so.1 must be the CUDA driver; got .*cuMemcpyAsync"
    ):
        Driver(ctypes.CDLL(None))


def test_a_machine_without_a_driver_says_so(monkeypatch):
    monkeypatch.setattr("kvferry.kernels.driver.LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(DriverError, match=r"needs the CUDA driver \(libcuda-that-is-not-there"):
        Driver.load()
