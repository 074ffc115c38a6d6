"""When blobs are compared, and with what."""

import pytest
import xxhash

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.checksum import SAMPLE_EVERY, Algorithm, Verify, checksum, empty_parts


@pytest.mark.parametrize(
    ("name", "checked"), [("always", 160), ("sampled", 160 // SAMPLE_EVERY), ("off", 0)]
)
def test_how_many_reads_are_checked(name, checked):
    assert sum(Verify(name).wants(number) for number in range(1, 161)) == checked


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValueError, match="'sometimes' is not a valid Verify"):
        Verify("sometimes")


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview], ids=lambda m: m.__name__)
@pytest.mark.parametrize("num_bytes", [0, 1, 63, 4096, 100_001])
def test_is_xxh3_64_of_the_bytes(make, num_bytes):
    data = bytes(range(256)) * (num_bytes // 256 + 1)
    data = data[:num_bytes]
    assert checksum(make(data)) == xxhash.xxh3_64_intdigest(data)


def test_one_flipped_bit_changes_it():
    data = bytearray(b"\xa5" * 1000)
    clean = checksum(data)
    for at in range(1000):
        data[at] ^= 1 << at % 8
        assert checksum(data) != clean
        data[at] ^= 1 << at % 8


@pytest.mark.parametrize("parts", [1, 2, 7, fmt.MAX_PARTS])
def test_parts_of_a_new_frame_cover_the_blob(parts):
    table = list(fmt.PART.iter_unpack(empty_parts(parts * 4096, parts)))
    assert [rank for rank, *_ in table] == list(range(parts))
    assert [offset for *_, offset, _, _ in table] == [rank * 4096 for rank in range(parts)]
    assert {size for *_, size, _ in table} == {4096}
    assert {state for _, state, *_ in table} == {fmt.PartState.EMPTY}
    assert {algorithm for _, _, algorithm, *_ in table} == {Algorithm.NONE}
