import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import table as table_module
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.table import HOLE, LayoutTable, pack_entries


def group(*pages, num_blocks=8):
    tensors = [torch.zeros(num_blocks, page, dtype=torch.uint8) for page in pages]
    return BlockLayout.from_tensors(tensors, pages, 1)


def int64s(*values):
    return np.array(values, np.int64)


def unpack(entries):
    word = entries[:, 0].view(np.uint64)
    fields = (word & 0xFFFFFFF, word >> 28 & 0xFFFFF, word >> 48 & 0xFF, word >> 56)
    return [tuple(map(int, row)) for row in np.stack(fields, axis=1)]


def test_a_table_lists_the_segments_of_all_groups():
    a, b = group(64, 32), group(4096, num_blocks=3)

    table = LayoutTable.from_layouts([a, b])

    rows = [[s.base_address, s.block_stride, s.nbytes, s.blob_offset] for s in a.segments]
    rows += [[b.segments[0].base_address, 4096, 4096, 0]]
    assert table.segments.dtype == torch.int64
    assert table.segments.tolist() == rows
    assert (table.num_segments, table.block_bytes) == (3, (96, 4096))
    assert table.device == torch.device("cpu")


def test_tiles_cover_each_segment_once():
    a, b = group(4096, 1000), group(1025)
    table = LayoutTable.from_layouts([a, b])

    tiles = table.tiles(1024)

    assert (tiles.first, tiles.count, tiles.tile_bytes) == ((0, 5), (5, 2), 1024)
    base = [s.base_address for s in (*a.segments, *b.segments)]
    assert tiles.table.tolist() == [
        *([base[0] + i * 1024, 4096, i * 1024, 1024] for i in range(4)),
        [base[1], 1000, 4096, 1000],
        [base[2], 1025, 0, 1024],
        [base[2] + 1024, 1025, 1024, 1],
    ]
    assert table.tiles(1024) is tiles
    assert table.tiles(2048).count == (3, 1)


def test_a_group_table_that_was_kept_stays(monkeypatch):
    monkeypatch.setattr(table_module, "MAX_KEPT_COUNTS", 2)
    tiles = LayoutTable.from_layouts([group(64), group(4096)]).tiles(1024)
    kept = tiles.groups([1, 2]), tiles.groups((3, 0))

    later = tiles.groups([4, 4])

    assert later.tolist() == [[4, 0, 1], [4, 1, 4]]
    assert tiles.groups([1, 2]) is kept[0]
    assert tiles.groups([3, 0]) is kept[1]
    assert tiles.groups([4, 4]) is not later


@pytest.mark.parametrize("tile_bytes", [0, -1024, 512, 1025, 3072])
def test_a_tile_is_a_power_of_two(tile_bytes):
    with pytest.raises(ValueError, match=f"tile_bytes must be a power of two.*got {tile_bytes}"):
        LayoutTable.from_layouts([group(64)]).tiles(tile_bytes)


@pytest.mark.parametrize(
    ("pages", "alignment"),
    [((64, 32), 16), ((576, 656), 16), ((352, 8), 8), ((12,), 4), ((6, 3), 1)],
)
def test_alignment_is_that_of_the_narrowest_group(pages, alignment):
    assert LayoutTable.from_layouts([group(1024), group(*pages)]).alignment == alignment


def test_groups_must_be_few_and_on_one_device():
    with pytest.raises(ValueError, match=r"1\.\.16 groups; got 0"):
        LayoutTable.from_layouts([])
    with pytest.raises(ValueError, match=r"1\.\.16 groups; got 17"):
        LayoutTable.from_layouts([group(64)] * 17)
    a = group(64)
    elsewhere = BlockLayout(a.segments, a.tensors, 8, 1, 64, 64, torch.device("cuda", 0))
    with pytest.raises(ValueError, match="one device; got cpu, cuda:0"):
        LayoutTable.from_layouts([a, elsewhere])


def test_entries_hold_block_blob_place_and_count():
    table = LayoutTable.from_layouts([group(64), group(64)])

    entries = pack_entries(
        table,
        int64s(7, HOLE, 2, 0, 0),
        int64s(1 << 56, -5, 64, 128, 192),
        [3, 2],
        int64s(5, 5, 5, 1048575, 3),
        int64s(0, 1, 2, 255, 9),
    )

    assert entries.dtype == np.int64
    assert entries[:, 1].tolist() == [1 << 56, -5, 64, 128, 192]
    assert unpack(entries) == [
        (7, 5, 0, 2),
        (0xFFFFFFF, 5, 1, 2),
        (2, 5, 2, 2),
        (0, 1048575, 255, 1),
        (0, 3, 9, 1),
    ]


def test_entries_without_blobs_hold_the_block_alone():
    table = LayoutTable.from_layouts([group(64)])
    entries = pack_entries(table, int64s(3, HOLE), int64s(64, 0), [2])
    assert entries.tolist() == [[3, 64], [0xFFFFFFF, 0]]
    assert pack_entries(table, int64s(), int64s(), [0]).shape == (0, 2)
    assert pack_entries(table, int64s(), int64s(), [0], int64s(), int64s()).shape == (0, 2)


def test_255_blocks_of_one_blob_fit():
    table = LayoutTable.from_layouts([group(64)])
    n = 255
    blobs, places = np.zeros(n, np.int64), np.arange(n)
    entries = pack_entries(table, places % 8, places * 64 + 64, [n], blobs, places)
    assert unpack(entries) == [(i % 8, 0, i, 255) for i in range(n)]


ONE = int64s(1)
BAD = [
    pytest.param({"block_ids": int64s(8)}, r"group 0 must be -1 or in 0\.\.7; got 8", id="block"),
    pytest.param({"block_ids": int64s(-2)}, "got -2", id="negative-block"),
    pytest.param({"block_ids": ONE.astype(np.int32)}, "block_ids must be int64", id="int32"),
    pytest.param({"block_ids": ONE[None]}, r"int64 \[N\]; got int64 \[1, 1\]", id="2-D"),
    pytest.param({"addresses": int64s(16, 16)}, r"addresses must be int64 \[1\]", id="longer"),
    pytest.param({"addresses": int64s(0)}, "positive multiples of 16; got 0", id="null"),
    pytest.param({"addresses": int64s(24)}, "multiples of 16; got 24", id="misaligned"),
    pytest.param({"counts": [2]}, r"sum to 1; got \[2\]", id="counts"),
    pytest.param({"counts": [1, 0]}, "1 numbers", id="groups"),
    pytest.param({"counts": []}, "1 numbers", id="no-groups"),
    pytest.param({"blob_ids": ONE}, "given together", id="blobs-alone"),
    pytest.param({"places": ONE}, "given together", id="places-alone"),
    pytest.param({"blob_ids": int64s(1 << 20), "places": ONE}, "got 1048576", id="blob"),
    pytest.param({"blob_ids": int64s(-1), "places": ONE}, r"0\.\.1048575; got -1", id="no-blob"),
    pytest.param({"blob_ids": ONE, "places": int64s(256)}, r"0\.\.255; got 256", id="place"),
    pytest.param({"blob_ids": ONE, "places": int64s(1, 2)}, r"places must be int64 \[1\]", id="p"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_entries_say_what_came(changes, message):
    table = LayoutTable.from_layouts([group(64)])
    good = {"block_ids": ONE, "addresses": int64s(64), "counts": [1]}
    assert pack_entries(table, **good).tolist() == [[1, 64]]
    with pytest.raises(ValueError, match=message):
        pack_entries(table, **good | changes)


def test_a_block_is_looked_for_in_its_own_group():
    table = LayoutTable.from_layouts([group(64), group(64, num_blocks=2)])
    pack_entries(table, int64s(7, 1), int64s(64, 64), [1, 1])
    with pytest.raises(ValueError, match=r"group 1 must be -1 or in 0\.\.1; got 7"):
        pack_entries(table, int64s(1, 7), int64s(64, 64), [1, 1])


def test_counts_are_not_negative():
    table = LayoutTable.from_layouts([group(64), group(64)])
    with pytest.raises(ValueError, match=r"counts must be 2 numbers.*got \[-1, 2\]"):
        pack_entries(table, int64s(0), int64s(64), [-1, 2])


def test_a_blob_with_too_many_blocks_or_of_two_groups_is_refused():
    table = LayoutTable.from_layouts([group(64), group(64)])
    n = 256
    zeros, addresses = np.zeros(n, np.int64), np.full(n, 64)
    with pytest.raises(ValueError, match="at most 255 times; got 256 times 0"):
        pack_entries(table, zeros, addresses, [n, 0], zeros, np.arange(n))
    with pytest.raises(ValueError, match="got blob 3 in two"):
        pack_entries(table, int64s(0, 0), int64s(64, 64), [1, 1], int64s(3, 3), int64s(0, 1))


@settings(max_examples=60, deadline=None)
@given(
    pages=st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=4), min_size=1, max_size=4),
    tile_bytes=st.sampled_from([1024, 2048, 4096]),
)
def test_tiles_end_to_end_are_the_blob(pages, tile_bytes):
    table = LayoutTable.from_layouts([group(*sizes) for sizes in pages])
    tiles = table.tiles(tile_bytes)
    rows = tiles.table.tolist()
    assert len(rows) == sum(tiles.count)
    for layout, first, count in zip(table.layouts, tiles.first, tiles.count, strict=True):
        mine = rows[first : first + count]
        ends = [offset + nbytes for _, _, offset, nbytes in mine]
        assert [offset for _, _, offset, _ in mine] == [0, *ends[:-1]]
        assert ends[-1] == layout.block_bytes
        for address, stride, offset, nbytes in mine:
            assert 0 < nbytes <= tile_bytes
            assert any(
                s.blob_offset <= offset
                and offset + nbytes <= s.blob_offset + s.nbytes
                and (address - s.base_address, stride) == (offset - s.blob_offset, s.block_stride)
                for s in layout.segments
            )
