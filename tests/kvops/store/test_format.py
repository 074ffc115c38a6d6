"""The bytes of an arena are what the table in format.py says, field by field."""

import re
import struct

import pytest

from kvferry.kvops.store import checksum, frames
from kvferry.kvops.store import format as fmt

from .chunks import MIB

FIELD = re.compile(r"^    (\d+) +(u8|u16|u32|u64|\d+s) +(\w+)")
CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
SECTIONS = ["Superblock", "Attach slot", "Span table entry", "Frame header", "Part:", "Index slot"]


def documented():
    """Return the fields (offset, struct code, name) of each section of the docstring."""
    tables, current = {}, None
    for line in fmt.__doc__.splitlines():
        current = next((s for s in SECTIONS if line.startswith(s)), current)
        found = FIELD.match(line)
        if current and found:
            offset, kind, name = found.groups()
            tables.setdefault(current, []).append((int(offset), CODES.get(kind, kind), name))
    return tables


TABLES = documented()


def layout(fields):
    return "<" + "".join(code for _, code, _ in fields)


def unfold(format_string):
    """Write "<3Q" as "<QQQ"; strings keep their counts."""
    return re.sub(r"(\d+)([BHIQ])", lambda m: m[2] * int(m[1]), format_string)


@pytest.mark.parametrize("section", SECTIONS)
def test_fields_follow_each_other_without_gaps(section):
    at = 0
    for offset, code, name in TABLES[section]:
        assert offset == at, name
        at += struct.calcsize("<" + code)


@pytest.mark.parametrize(
    ("section", "fields", "actual"),
    [
        pytest.param("Superblock", slice(0, 9), fmt.SUPERBLOCK, id="superblock"),
        pytest.param("Superblock", slice(3, 9), fmt.GEOMETRY, id="geometry"),
        pytest.param("Superblock", slice(13, 16), fmt.OWNER, id="owner"),
        pytest.param("Attach slot", slice(None), fmt.ATTACH, id="attach"),
        pytest.param("Span table entry", slice(None), fmt.SPAN_ENTRY, id="span-entry"),
        pytest.param("Frame header", slice(1, -1), fmt.HEADER_BODY, id="header-body"),
        pytest.param("Part:", slice(None), fmt.PART, id="part"),
    ],
)
def test_structs_are_the_documented_fields(section, fields, actual):
    assert unfold(actual.format) == layout(TABLES[section][fields])


@pytest.mark.parametrize(
    ("section", "name", "offset"),
    [
        pytest.param("Superblock", "index_sequence", fmt.INDEX_SEQUENCE_WORD * 8, id="index_sequence"),
        pytest.param("Superblock", "index", fmt.INDEX_OFFSET_WORD * 8, id="index"),
        pytest.param("Superblock", "index_slots", fmt.INDEX_SLOTS_WORD * 8, id="index_slots"),
        pytest.param("Superblock", "epoch", fmt.EPOCH_WORD * 8, id="epoch"),
        pytest.param("Superblock", "owner_pid", fmt.OWNER_OFFSET, id="owner_pid"),
        pytest.param("Superblock", "attach_sequence", fmt.ATTACH_SEQUENCE_WORD * 8, id="attach_sequence"),
        pytest.param("Attach slot", "writes_begun", frames._WRITES_BEGUN * 8, id="writes_begun"),
        pytest.param("Attach slot", "writes_done", frames._WRITES_DONE * 8, id="writes_done"),
        pytest.param("Attach slot", "reads_begun", frames._READS_BEGUN * 8, id="reads_begun"),
        pytest.param("Attach slot", "reads_done", frames._READS_DONE * 8, id="reads_done"),
        pytest.param("Attach slot", "frames_bad", fmt.ATTACH_BAD_WORD * 8, id="frames_bad"),
        pytest.param("Frame header", "key", 8, id="key"),
        pytest.param("Frame header", "blob", fmt.HEADER_BLOB_WORD * 8, id="blob"),
        pytest.param("Frame header", "check", fmt.HEADER_CHECK, id="header-check"),
        pytest.param(
            "Part:", "checksum", checksum.CHECKSUM_WORD * 8 - fmt.HEADER_FIXED_BYTES, id="checksum"
        ),
        pytest.param("Part:", "checksum", frames._PART_CHECKSUM_WORD * 8, id="checksum-of-a-rank"),
    ],
)  # fmt: skip
def test_constants_point_to_the_documented_field(section, name, offset):
    (there,) = [at for at, _, field in TABLES[section] if field == name]
    assert there == offset


@pytest.mark.parametrize(
    ("num_bytes", "section"),
    [
        pytest.param(fmt.ATTACH_BYTES, "Attach slot", id="attach"),
        pytest.param(fmt.SPAN_ENTRY_BYTES, "Span table entry", id="span-entry"),
        pytest.param(fmt.HEADER_FIXED_BYTES, "Frame header", id="header"),
        pytest.param(fmt.PART_BYTES, "Part:", id="part"),
        pytest.param(fmt.INDEX_SLOT_BYTES, "Index slot", id="index-slot"),
    ],
)
def test_sizes_are_those_of_the_documented_fields(num_bytes, section):
    assert struct.calcsize(layout(TABLES[section])) == num_bytes


def test_places_in_the_arena():
    """0 superblock, 4096 attach table, 8192 span table."""
    assert fmt.SUPERBLOCK_BYTES == fmt.ATTACH_OFFSET == 4096
    assert fmt.ATTACH_OFFSET + fmt.ATTACH_SLOTS * fmt.ATTACH_BYTES == fmt.SPAN_TABLE_OFFSET == 8192
    assert fmt.BODY_CHECK_AND_PART.size == fmt.HEADER_BODY.size + fmt.CHECK.size + fmt.PART.size
    assert 8 + fmt.HEADER_BODY.size == fmt.HEADER_CHECK
    assert fmt.HEADER_BLOB_WORD * 8 % 8 == fmt.HEADER_FIXED_BYTES % 8 == fmt.PART_BYTES % 8 == 0


def test_states_fit_the_state_word():
    assert [state.value for state in fmt.State] == [0, 1, 2, 3]
    assert [state.value for state in fmt.PartState] == [0, 1, 2]
    assert fmt.EPOCH_BITS + fmt.GENERATION_COUNT_BITS == 64 - 8
    # lease() tells READY and BAD from the rest by all bits but the lowest
    assert fmt.State.READY | 1 == fmt.State.BAD
    assert fmt.State.WRITING | 1 != fmt.State.BAD
    assert fmt.State.FREE | 1 != fmt.State.BAD


@pytest.mark.parametrize(
    ("parts", "num_bytes"),
    [(1, 128), (2, 192), (3, 192), (8, 384), (fmt.MAX_PARTS, 96 + 1024 * 32)],
)
def test_a_header_grows_by_its_parts(parts, num_bytes):
    assert fmt.header_bytes(parts) == -(-num_bytes // 64) * 64


@pytest.mark.parametrize(
    ("arena_bytes", "slab_bytes"),
    [
        pytest.param(16 * MIB, 256 << 10, id="least"),
        pytest.param(64 * MIB + 4096, 512 << 10, id="odd"),
        pytest.param(4 << 30, 32 << 20, id="default"),
        pytest.param(1 << 40, 32 << 20, id="1TiB"),
    ],
)
def test_slabs_are_about_a_128th(arena_bytes, slab_bytes):
    assert fmt.slab_bytes_for(arena_bytes) == slab_bytes


@pytest.mark.parametrize("hash_bytes", [16, 20, 31, 32])
@pytest.mark.parametrize("group", [0, 1, 258, 0xFFFF_FFFF])
def test_a_key_is_hash_and_group(hash_bytes, group):
    digest = bytes(range(1, hash_bytes + 1))
    key = fmt.make_key(digest, group)
    assert key == digest + group.to_bytes(4, "big")
    fmt.check_key(key)


@pytest.mark.parametrize("num_bytes", [0, 4, 19, 37, 100])
def test_a_key_of_another_length_is_refused(num_bytes):
    with pytest.raises(ValueError, match=f"key must be 16 to 32 bytes .* got {num_bytes} bytes"):
        fmt.check_key(bytes(num_bytes))


def test_a_tag_is_never_empty_or_deleted(monkeypatch):
    for value in (0, 1, 2, 77):
        monkeypatch.setattr(fmt.xxhash, "xxh3_64_intdigest", lambda _, value=value: value)
        assert fmt.key_tag(b"", b"") == max(2, value)


def test_keys_differ_in_group_and_namespace():
    tags = {fmt.key_tag(ns * 16, fmt.make_key(b"h" * 32, g)) for ns in (b"a", b"b") for g in (0, 1)}
    assert len(tags) == 4
