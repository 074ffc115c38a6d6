"""Checksums: the arithmetic, what it detects, and the kernels that compute it on the way."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.checksum import (
    FOLD,
    KEY,
    SEED,
    checksum_bytes,
    checksum_share,
    lane_keys,
    position_keys,
)

MASK = (1 << 64) - 1
CPU = torch.device("cpu")


def plain_checksum(data, position=0):
    """Compute the definition, number by number."""
    data = bytes(data) + bytes(-len(data) % 16)
    total = SEED
    for start in range(0, len(data), 16):
        numbers = [
            int.from_bytes(data[start + 4 * i : start + 4 * i + 4], "little") for i in range(4)
        ]
        digest = sum(number * FOLD**place for place, number in enumerate(numbers)) % (1 << 32)
        total += digest * pow(KEY, (position + start) // 16, 1 << 32)
    return total & MASK


def some_bytes(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 4096, (1 << 18) + 40])
@pytest.mark.parametrize("position", [0, 16, 48, 1 << 33])
def test_it_is_the_definition(count, position):
    data = some_bytes(count)
    assert checksum_bytes(data, position) == plain_checksum(data, position)
    assert checksum_bytes(data.tobytes(), position) == plain_checksum(data, position)


def test_a_known_blob_keeps_its_checksum():
    # a frame written by one release is read by the next
    assert checksum_bytes(bytes(range(256)) * 16) == 0xB4E1146871445109


@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 25), max_size=4))
@settings(deadline=None)
def test_shares_of_pieces_add_up(data, cuts):
    ends = sorted({min(16 * cut, len(data)) for cut in cuts} | {0, len(data)})
    shares = [checksum_share(data[a:b], a) for a, b in itertools.pairwise(ends) if a % 16 == 0]
    assert (SEED + sum(shares)) & MASK == checksum_bytes(data)


@pytest.mark.parametrize("position", [-16, 8, 1])
def test_a_piece_starts_on_a_vector(position):
    with pytest.raises(ValueError, match="position must be a multiple of 16"):
        checksum_share(b"x" * 16, position)


def test_keys():
    assert lane_keys(100).tolist() == [pow(KEY, i, 1 << 32) for i in range(100)]
    assert position_keys(np.array([0, 15, 16, 1 << 30])).tolist() == [
        1, 1, KEY, pow(KEY, 1 << 26, 1 << 32),
    ]  # fmt: skip
    # all of them odd, and 2**30 of them: the order of a base that is 5 mod 8
    assert KEY % 8 == 5
    assert pow(KEY, 1 << 30, 1 << 32) == 1
    assert pow(KEY, 1 << 29, 1 << 32) != 1


def test_any_single_flipped_bit_is_seen():
    data = some_bytes(4096)
    good = checksum_bytes(data)
    flipped = data.copy()
    for bit in range(8 * data.size):
        flipped[bit // 8] ^= 1 << bit % 8
        assert checksum_bytes(flipped) != good
        flipped[bit // 8] ^= 1 << bit % 8


def test_any_single_flipped_bit_is_seen_in_zeros_and_far_into_a_blob():
    for base, position in ((b"\0" * 16, 0), (b"\xff" * 16, (1 << 34) - 16)):
        for bit in range(128):
            flipped = bytearray(base)
            flipped[bit // 8] ^= 1 << bit % 8
            assert checksum_bytes(flipped, position) != checksum_bytes(base, position)


def test_two_flipped_bits_of_different_vectors_are_seen():
    # the top bits, where products of odd numbers would agree mod 2**32
    for a, b in ((31, 128 + 31), (63, 128 * 64 + 63), (127, 128 * 200 + 95)):
        flipped = bytearray(4096)
        flipped[a // 8] ^= 1 << a % 8
        flipped[b // 8] ^= 1 << b % 8
        assert checksum_bytes(flipped) != SEED


def test_swapped_vectors_are_seen():
    vectors = some_bytes(64 * 16).reshape(-1, 16)
    good = checksum_bytes(vectors.tobytes())
    for i in range(64):
        for j in range(i):
            swapped = vectors.copy()
            swapped[[i, j]] = swapped[[j, i]]
            assert checksum_bytes(swapped.tobytes()) != good


def test_swapped_vectors_that_differ_in_one_bit_are_seen():
    for bit in range(128):
        for distance in (1, 2, 64, 255):
            data = np.zeros((256, 16), np.uint8)
            data[0, bit // 8] = 1 << bit % 8
            swapped = np.roll(data, distance, axis=0)
            assert checksum_bytes(swapped.tobytes()) != checksum_bytes(data.tobytes())


@pytest.mark.parametrize("block", [64, 4096, 1 << 16])
def test_swapped_blocks_are_seen(block):
    blocks = some_bytes(4 * block).reshape(4, block)
    good = checksum_bytes(blocks.tobytes())
    for i, j in ((0, 1), (0, 2), (1, 3)):
        swapped = blocks.copy()
        swapped[[i, j]] = swapped[[j, i]]
        assert checksum_bytes(swapped.tobytes()) != good


def test_missing_repeated_and_moved_segments_are_seen():
    segments = some_bytes(8 * 1024).reshape(8, 1024)
    good = checksum_bytes(segments.tobytes())
    for i in range(8):
        missing = segments.copy()
        missing[i] = 0
        stale = segments.copy()
        stale[i] = 0xA5
        repeated = segments.copy()
        repeated[i] = segments[i - 1]
        for wrong in (missing, stale, repeated, np.roll(segments, 1, axis=0), segments[:7]):
            assert checksum_bytes(wrong.tobytes()) != good


def test_a_blob_of_zeros_is_no_header_of_zeros():
    assert checksum_bytes(bytes(4096)) == SEED != 0
    assert checksum_bytes(some_bytes(4096)) != SEED


# the kernels


def blocks_test(function):
    """Skip where Triton is missing; the arithmetic above is tested without it."""
    return pytest.mark.usefixtures("has_triton")(function)


@pytest.fixture
def has_triton():
    pytest.importorskip("triton")


class Transfer:
    """Three chunks of two blocks of two groups, one of them partial, one with a hole; fields as in frame headers."""

    COUNTS = (4, 2)
    IDS = (3, 0, -1, 1, 4, 2)
    BLOBS = (0, 0, 1, 1, 2, 2)
    PLACES = (0, 1, 0, 1, 1, 2)

    def __init__(self, pages=((2048, 48, 4096), (656, 16)), padding=0, num_blobs=3):
        from kvferry.kernels.layout import BlockLayout
        from kvferry.kernels.table import LayoutTable, pack_entries

        generator = torch.Generator().manual_seed(5)
        self.caches = [
            [
                torch.randint(0, 256, (5, page + padding), dtype=torch.uint8, generator=generator)
                for page in group
            ]
            for group in pages
        ]
        layouts = [
            BlockLayout.from_tensors(
                [t[:, :page] for t, page in zip(cache, group, strict=True)], group, 1
            )
            for cache, group in zip(self.caches, pages, strict=True)
        ]
        self.table = LayoutTable.from_layouts(layouts)
        part = 4 * max(self.table.block_bytes)
        self.frames = torch.full((3, part + 64), 0xA5, dtype=torch.uint8)
        groups = np.repeat([0, 1], self.COUNTS)
        self.starts = np.array(self.PLACES) * np.array(self.table.block_bytes)[groups]
        addresses = np.array([self.frames[blob].data_ptr() for blob in self.BLOBS]) + self.starts
        packed = pack_entries(
            self.table,
            np.array(self.IDS),
            addresses,
            self.COUNTS,
            np.array(self.BLOBS),
            np.array(self.PLACES),
        )
        self.entries = torch.from_numpy(packed)
        # fields of headers that lie 64 bytes apart
        self.headers = torch.full((num_blobs, 8), 0x5A5A5A5A5A5A5A5A, dtype=torch.int64)
        self.sums = self.headers[:, 1]
        self.done = self.headers.view(torch.int32)[:, 4]
        self.mismatch = torch.zeros((num_blobs, 3), dtype=torch.int32)[:, 1]
        self.workspace = torch.zeros((num_blobs, 2), dtype=torch.int64)

    def expected(self, blob):
        """Take the checksum of what was moved of a blob, from its frame."""
        total = SEED
        for block, of_blob, start, group in zip(
            self.IDS, self.BLOBS, self.starts, (0, 0, 0, 0, 1, 1), strict=True
        ):
            if of_blob == blob and block >= 0:
                end = start + self.table.block_bytes[group]
                total += checksum_share(self.frames[blob, start:end].numpy(), int(start))
        return (total + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.fixture
def moves(has_triton, interpreted):
    """Return gather and scatter, in the interpreter, and the launches."""
    from kvferry.kernels import block_copy
    from kvferry.kernels.gather import gather_blocks
    from kvferry.kernels.scatter import scatter_blocks

    return gather_blocks, scatter_blocks, interpreted(block_copy, "_copy_blocks_kernel")


@pytest.mark.parametrize("max_sms", [1, 3, 16])
@pytest.mark.parametrize("budget", [1 << 10, 1 << 18])
def test_a_gather_writes_checksums_then_flags(max_sms, budget, moves):
    gather, _, launches = moves
    transfer = Transfer()
    gather(
        transfer.table, transfer.entries, transfer.COUNTS, max_sms=max_sms, bytes_in_flight=budget,
        checksums=transfer.sums, done=transfer.done, workspace=transfer.workspace,
    )  # fmt: skip
    assert transfer.sums.tolist() == [transfer.expected(blob) for blob in range(3)]
    assert transfer.done.tolist() == [1, 1, 1]
    assert not transfer.workspace.any()
    # nothing else in the headers
    untouched = transfer.headers.clone()
    untouched[:, 1] = 0x5A5A5A5A5A5A5A5A
    untouched.view(torch.int32)[:, 4] = 0x5A5A5A5A
    assert bool((untouched == 0x5A5A5A5A5A5A5A5A).all())
    assert len(launches) == 1


@blocks_test
def test_the_twin_writes_the_same():
    from kvferry.kernels import reference

    transfer = Transfer()
    reference.gather_blocks(
        transfer.table,
        transfer.entries,
        transfer.COUNTS,
        checksums=transfer.sums,
        done=transfer.done,
    )
    assert transfer.sums.tolist() == [transfer.expected(blob) for blob in range(3)]
    assert transfer.done.tolist() == [1, 1, 1]


@pytest.mark.parametrize("padding", [0, 8, 4])
def test_narrow_accesses_make_the_same_checksums(padding, moves):
    gather, _, _ = moves
    transfer = Transfer(padding=padding)
    assert transfer.table.alignment == (padding or 16)
    gather(transfer.table, transfer.entries, transfer.COUNTS, checksums=transfer.sums)
    assert transfer.sums.tolist() == [transfer.expected(blob) for blob in range(3)]


@pytest.mark.parametrize("lacks", ["checksums", "done"])
def test_a_flag_without_a_checksum_and_the_reverse(lacks, moves):
    gather, _, _ = moves
    transfer = Transfer()
    fields = {"checksums": transfer.sums, "done": transfer.done}
    del fields[lacks]
    gather(
        transfer.table, transfer.entries, transfer.COUNTS, workspace=transfer.workspace, **fields
    )
    kept = 0x5A5A5A5A5A5A5A5A if lacks == "checksums" else 0x5A5A5A5A
    assert (transfer.sums if lacks == "checksums" else transfer.done).tolist() == [kept] * 3
    assert not transfer.workspace.any()


def test_the_workspace_serves_one_launch_after_another(moves):
    gather, scatter, launches = moves
    transfer = Transfer()
    for _ in range(2):
        transfer.done.zero_()
        transfer.sums.zero_()
        gather(
            transfer.table, transfer.entries, transfer.COUNTS, max_sms=4,
            checksums=transfer.sums, done=transfer.done, workspace=transfer.workspace,
        )  # fmt: skip
        assert transfer.sums.tolist() == [transfer.expected(blob) for blob in range(3)]
        scatter(
            transfer.table, transfer.entries, transfer.COUNTS, max_sms=5,
            checksums=transfer.sums, mismatch=transfer.mismatch, workspace=transfer.workspace,
        )  # fmt: skip
        assert not transfer.mismatch.any()
        assert not transfer.workspace.any()
    assert len(launches) == 4


def flip(transfer):
    transfer.frames[0, 17] ^= 4


def swap_vectors(transfer):
    transfer.frames[0, :32] = transfer.frames[0, :32].view(2, 16).flip(0).flatten()


def swap_blocks(transfer):
    size = transfer.table.block_bytes[0]
    transfer.frames[0, : 2 * size] = transfer.frames[0, : 2 * size].view(2, size).flip(0).flatten()


def lose_a_segment(transfer):
    transfer.frames[0, 2048 : 2048 + 48] = 0xA5


def zero(transfer):
    transfer.frames[0].zero_()


@pytest.mark.parametrize("damage", [flip, swap_vectors, swap_blocks, lose_a_segment, zero])
def test_a_scatter_reports_the_damaged_blob(damage, moves):
    gather, scatter, _ = moves
    transfer = Transfer()
    gather(transfer.table, transfer.entries, transfer.COUNTS, checksums=transfer.sums)
    damage(transfer)
    transfer.done.zero_()
    scatter(
        transfer.table, transfer.entries, transfer.COUNTS, checksums=transfer.sums,
        mismatch=transfer.mismatch, done=transfer.done, workspace=transfer.workspace,
    )  # fmt: skip
    assert transfer.mismatch.tolist() == [1, 0, 0]
    assert transfer.done.tolist() == [1, 1, 1]
    assert not transfer.workspace.any()


def test_a_wrong_checksum_in_a_header_is_reported(moves):
    gather, scatter, _ = moves
    transfer = Transfer()
    gather(transfer.table, transfer.entries, transfer.COUNTS, checksums=transfer.sums)
    transfer.sums[2] = 0
    scatter(
        transfer.table,
        transfer.entries,
        transfer.COUNTS,
        checksums=transfer.sums,
        mismatch=transfer.mismatch,
    )
    assert transfer.mismatch.tolist() == [0, 0, 1]


def test_a_blob_of_holes_gets_neither_checksum_nor_flag(moves):
    gather, _, _ = moves
    transfer = Transfer()
    transfer.entries[2:4, 0] |= (1 << 28) - 1
    # a hole counts for nothing: what remains of blob 1 is no block
    gather(
        transfer.table, transfer.entries, transfer.COUNTS,
        checksums=transfer.sums, done=transfer.done, workspace=transfer.workspace,
    )  # fmt: skip
    assert transfer.sums[1] == 0x5A5A5A5A5A5A5A5A
    assert transfer.done.tolist() == [1, 0x5A5A5A5A, 1]
    assert not transfer.workspace.any()


@pytest.mark.parametrize("pages", [((2048, 40), (656,)), ((1001,), (16,))])
def test_checksums_need_whole_vectors(pages, moves):
    gather, _, launches = moves
    transfer = Transfer(pages=pages)
    with pytest.raises(ValueError, match="checksums must be None"):
        gather(transfer.table, transfer.entries, transfer.COUNTS, checksums=transfer.sums)
    assert not launches
    assert bool((transfer.frames == 0xA5).all())
