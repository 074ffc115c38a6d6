"""Bytes on disk: there and back, and no flipped bit passes for what was written."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.disk import format as disk
from kvferry.kvops.store.disk import records as rec

from .blobs import NAMESPACE, data, frame_header, key, slot_bytes, tag

GENERATION = 3 << disk.GENERATION_COUNT_BITS | 9


def page(number=1, num_bytes=6000, parts=1, **kwargs):
    blob = data(number, num_bytes, parts)
    out = bytearray(b"\xa5" * disk.header_area(parts))
    disk.pack_header_page(
        out, 0, generation=GENERATION, blob_bytes=num_bytes,
        frame_header=frame_header(number, blob, parts, **kwargs),
    )  # fmt: skip
    return out


@pytest.mark.parametrize(
    ("parts", "area"),
    [
        pytest.param(1, 4096, id="one part"),
        pytest.param(3, 4096, id="a header that is no multiple of 64"),
        pytest.param(123, 4096, id="the most parts in one page"),
        pytest.param(124, 8192, id="one part too many for a page"),
        pytest.param(1024, 36864, id="the most parts"),
    ],
)
def test_a_header_page_says_what_it_was_told(parts, area):
    num_bytes = parts * 70
    out = page(7, num_bytes, parts)
    assert len(out) == disk.header_area(parts) == area
    header = disk.read_header_page(out)
    assert isinstance(header, disk.BlobHeader)
    assert (header.generation, header.blob_bytes, header.tokens) == (GENERATION, num_bytes, 16)
    assert (header.key, header.namespace) == (key(7), NAMESPACE)
    assert [(p.rank, p.offset, p.num_bytes) for p in header.parts] == [
        (n, 70 * n, 70) for n in range(parts)
    ]
    blob = data(7, num_bytes, parts)
    assert header.frame_header == bytes(8) + frame_header(7, blob, parts)[8:]
    assert not any(out[disk.PREAMBLE_BYTES + disk.frame_header_bytes(parts) :])


def test_a_frame_header_as_an_arena_keeps_it_is_cut_to_its_parts():
    blob = data(1, 6000, 3)
    rounded = frame_header(1, blob, 3).ljust(fmt.header_bytes(3), b"\xa5")
    out = bytearray(4096)
    disk.pack_header_page(out, 0, generation=1, blob_bytes=6000, frame_header=rounded)
    assert isinstance(disk.read_header_page(out), disk.BlobHeader)
    with pytest.raises(ValueError, match="frame_header must be 192 bytes"):
        disk.pack_header_page(out, 0, generation=1, blob_bytes=6000, frame_header=rounded[:160])


def test_every_bit_of_a_header_page_counts():
    out = page()
    used = disk.PREAMBLE_BYTES + disk.frame_header_bytes(1)
    for bit in range(8 * used):
        out[bit // 8] ^= 1 << bit % 8
        assert disk.read_header_page(out) in disk.REASONS
        out[bit // 8] ^= 1 << bit % 8
    assert isinstance(disk.read_header_page(out), disk.BlobHeader)


def test_reasons_of_header_pages():
    future, foreign = page(), page()
    future[8] = 2
    foreign[:8] = b"SOMEFILE"
    assert disk.read_header_page(bytes(4096)) == disk.EMPTY
    assert disk.read_header_page(foreign) == disk.MAGIC
    assert disk.read_header_page(future) == disk.VERSION
    assert disk.read_header_page(page()[:150]) == disk.TRUNCATED
    assert disk.read_header_page(b"") == disk.TRUNCATED
    # what a writer that is wrong writes with the right check
    assert disk.read_header_page(page(state=fmt.PartState.EMPTY)) == disk.HEADER
    assert disk.read_header_page(page(num_bytes=7001, parts=2)) == disk.HEADER


@given(st.binary(max_size=300))
def test_any_bytes_are_read_as_something(junk):
    for read in (disk.read_header_page, disk.read_superblock, rec.read_journal_header):
        assert read(junk) in disk.REASONS
        assert read(junk.ljust(4096, b"\0")) in disk.REASONS
    assert disk.read_header_page(disk.BLOB_MAGIC + b"\1\0\0\0" + junk) in disk.REASONS


BLOCK = disk.Superblock(0xABCDE, 3 * 4096, 4096, 4096, 5, 17)


def test_a_superblock_there_and_back():
    out = disk.pack_superblock(BLOCK)
    assert len(out) == disk.SUPERBLOCK_BYTES
    assert disk.read_superblock(out) == BLOCK
    assert BLOCK.file_bytes == 4096 + 4096 * 3 * 4096
    for bit in range(8 * 64):
        damaged = bytearray(out)
        damaged[bit // 8] ^= 1 << bit % 8
        assert disk.read_superblock(bytes(damaged)) in disk.REASONS
    assert disk.read_superblock(bytes(4096)) == disk.EMPTY
    assert disk.read_superblock(out[:4095]) == disk.TRUNCATED


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"slots": disk.MAX_SLOTS + 1},
        {"header_bytes": 3 * 4096},
        {"header_bytes": 0},
        {"slot_bytes": 3 * 4096 + 512},
        {"segment": disk.MAX_SEGMENTS},
    ],
    ids=str,
)
def test_a_superblock_that_contradicts_itself_is_damaged(wrong):
    fields = {name: getattr(BLOCK, name) for name in BLOCK.__slots__} | wrong
    assert disk.read_superblock(disk.pack_superblock(disk.Superblock(**fields))) == disk.HEADER


def test_a_record_there_and_back_and_every_bit_counts():
    out = rec.pack_record(
        tag(1), GENERATION, 4, 5, kind=rec.Kind.PUT, blob_bytes=6, namespace=7, seconds=8, reason=9,
        parts=10,
    )  # fmt: skip
    assert len(out) == rec.RECORD_BYTES
    (record,) = np.frombuffer(out, rec.RECORD_DTYPE)
    assert record.item()[:-1] == (*tag(1), GENERATION, 4, 5, 6, 7, 8, 1, 9, 10)
    assert rec.digests_of(memoryview(out)) == [record["check"]]
    sealed = bytearray(out[:56] + bytes(8))
    rec.seal_records(memoryview(sealed))
    assert sealed == out
    for bit in range(8 * 56):
        damaged = bytearray(out)
        damaged[bit // 8] ^= 1 << bit % 8
        assert rec.digests_of(memoryview(damaged)) != [record["check"]]


def test_a_journal_header_there_and_back():
    out = rec.pack_journal_header(12)
    assert rec.read_journal_header(out) == 12
    assert rec.read_journal_header(out[:8] + b"\2" + out[9:]) == disk.VERSION
    assert rec.read_journal_header(out[:20] + b"\2" + out[21:]) == disk.HEADER
    assert rec.read_journal_header(b"x" + out[1:]) == disk.MAGIC
    assert rec.read_journal_header(out[:63]) == disk.TRUNCATED
    assert rec.read_journal_header(bytes(64)) == disk.EMPTY


def test_reasons_are_a_closed_set_that_is_described():
    assert disk.reason_code("never heard of") == disk.REASONS.index(disk.OTHER)
    assert [disk.reason_name(disk.reason_code(reason)) for reason in disk.REASONS[1:]] == list(
        disk.REASONS[1:]
    )
    assert disk.reason_name(200) == disk.OTHER
    text = Path(disk.__file__).read_text().split('"""Why something')[1].split('"""')[0]
    described = re.findall(r"(?:^|· )(\w+):", text, re.MULTILINE)
    assert described == list(disk.REASONS[1:])


def test_a_slot_is_one_piece_of_whole_pages():
    assert len(slot_bytes(1, 1, 5000, 2)) == disk.slot_bytes_for(5000, 2) == 4096 + 8192
    assert disk.slot_bytes_for(4096, 124) == 8192 + 4096


def test_a_tag_depends_on_namespace_and_key():
    assert len({tag(1), tag(2), tag(1, b"another model 16")}) == 3
    low, high = tag(1)
    assert 0 <= low < 1 << 64
    assert 0 <= high < 1 << 64
