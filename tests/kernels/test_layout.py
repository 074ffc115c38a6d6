import numpy as np
import pytest
import torch

from kvferry.kernels.layout import PART_ALIGNMENT, BlockLayout, Segment


def pages(num_blocks=4, page=32, dtype=torch.int8):
    return torch.zeros(num_blocks, page, dtype=dtype)


def test_a_table_says_where_each_segment_is():
    first, second = pages(), pages(page=48)

    layout = BlockLayout.from_tensors([first, second], [32, 40], blocks_per_chunk=3)

    assert layout.segments == (
        Segment(first.data_ptr(), 32, 32, 0),
        Segment(second.data_ptr(), 48, 40, 32),
    )
    assert (layout.num_blocks, layout.block_bytes) == (4, 72)
    assert layout.part_bytes == 256  # 3 * 72 = 216, rounded up to whole cache lines
    assert layout.part_bytes % PART_ALIGNMENT == 0


def test_a_layout_keeps_its_tensors_alive():
    tensor = pages()
    layout = BlockLayout.from_tensors([tensor], [32], 1)
    assert layout.tensors[0] is tensor


@pytest.mark.parametrize(
    ("pages_bytes", "stride", "shift", "alignment"),
    [
        ([656 * 64, 132 * 64], 0, 0, 16),
        ([576], 0, 0, 16),
        ([576], 0, 8, 8),
        ([576], 4, 0, 4),
        ([34, 30], 0, 0, 2),
        ([16, 1, 15], 0, 0, 1),
    ],
)
def test_alignment_divides_every_number_of_the_table(pages_bytes, stride, shift, alignment):
    whole = torch.zeros(1 << 20, dtype=torch.uint8)
    start = -whole.data_ptr() % 64 + shift
    tensors = []
    for nbytes in pages_bytes:
        tensors.append(whole.as_strided((4, nbytes), (nbytes + stride, 1), start))
        start += 1 << 18
    assert BlockLayout.from_tensors(tensors, pages_bytes, 1).alignment == alignment


BAD_SEGMENTS = [
    pytest.param(torch.zeros(4, 32), 32, "int8 or uint8", id="float"),
    pytest.param(torch.zeros(4, 4, 8, dtype=torch.int8), 32, "num_blocks, page", id="3-D"),
    pytest.param(torch.zeros((), dtype=torch.int8), 1, "num_blocks, page", id="scalar"),
    pytest.param(pages(0), 32, "not empty", id="no-blocks"),
    pytest.param(pages(5), 32, "4 blocks", id="other-count"),
    pytest.param(pages(), 33, r"1\.\.32; got 33", id="page-too-long"),
    pytest.param(pages(), 0, r"1\.\.32; got 0", id="page-empty"),
    pytest.param(pages(32, 4).t(), 32, "adjacent bytes", id="transposed"),
    pytest.param(pages(1).expand(4, 32), 32, "do not overlap", id="stride-0"),
    pytest.param(
        torch.zeros(64, dtype=torch.int8).as_strided((4, 32), (8, 1)), 32, "overlap", id="overlap"
    ),
    pytest.param(torch.zeros(4, 32, dtype=torch.int8, device="meta"), 32, "memory", id="meta"),
]


@pytest.mark.parametrize(("tensor", "nbytes", "message"), BAD_SEGMENTS)
def test_a_tensor_that_cannot_be_described_is_named(tensor, nbytes, message):
    with pytest.raises(ValueError, match=rf"segments\[1\].*{message}"):
        BlockLayout.from_tensors([pages(), tensor], [32, nbytes], 1)


@pytest.mark.parametrize(
    ("segments", "page_bytes", "blocks_per_chunk", "message"),
    [
        ([], [], 1, "not empty; got 0 and 0"),
        ([pages()], [32, 32], 1, "equally long.*got 1 and 2"),
        ([pages()], [32], 0, "blocks_per_chunk must be at least 1; got 0"),
    ],
)
def test_bad_arguments_say_what_came(segments, page_bytes, blocks_per_chunk, message):
    with pytest.raises(ValueError, match=message):
        BlockLayout.from_tensors(segments, page_bytes, blocks_per_chunk)


@pytest.mark.parametrize(
    ("block_ids", "first", "message"),
    [
        ([4], 0, r"0\.\.3; got 4"),
        ([0, -1], 0, r"0\.\.3; got -1"),
        ([0, 1, 2], 0, r"places 0\.\.1 of the chunk; got 3 blocks from place 0"),
        ([0], 2, "got 1 blocks from place 2"),
        ([0], -1, "from place -1"),
        ([0.5], 0, "integers"),
        ([[0]], 0, "integers"),
        ([True], 0, "integers"),
    ],
)
def test_blocks_that_do_not_exist_or_fit_are_refused(block_ids, first, message):
    layout = BlockLayout.from_tensors([pages()], [32], 2)
    with pytest.raises(ValueError, match=message):
        layout.check_blocks(block_ids, first)


@pytest.mark.parametrize("block_ids", [[3, 3], (0, 1), np.array([2], np.int32), [], [True + 0]])
def test_good_blocks_come_back_as_int64(block_ids):
    layout = BlockLayout.from_tensors([pages()], [32], 2)
    ids = layout.check_blocks(block_ids)
    assert ids.dtype == np.int64
    assert ids.tolist() == list(block_ids)
