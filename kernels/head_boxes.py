"""Folds strided runs into boxes of one shape, so that one kernel with constant divisors moves them all.

A run is ``num_fragments`` fragments at equal distances on both sides. A box is ``groups`` such runs at
equal distances. The fragment size and the number of fragments are the same for all boxes of a table.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

EVERY_HEAD = -1
"""The ``head`` of a run that belongs to no head alone, such as a latent: every head range moves it."""


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Fragment i of a block: ``fragment_bytes`` on both sides, i strides from the first.

    Attributes:
        base_address: of fragment 0 in block 0.
        block_stride: between two blocks, in bytes.
        blob_offset: of fragment 0 in a block's share of a blob, in bytes.
        fragment_bytes: of one fragment.
        num_fragments: at least 1.
        local_stride: between two fragments of a block, in bytes.
        blob_stride: between the same two in the blob, in bytes.
        head: of the model, or ``EVERY_HEAD``.
    """

    base_address: int
    block_stride: int
    blob_offset: int
    fragment_bytes: int
    num_fragments: int
    local_stride: int
    blob_stride: int
    head: int = EVERY_HEAD


@dataclass(frozen=True, slots=True)
class Box:
    """``groups`` runs of one shape at equal distances.

    Attributes:
        run: the first of them.
        groups: at least 1.
        local_stride: between two of them in a block, in bytes.
        blob_stride: between the same two in the blob, in bytes.
    """

    run: HeadRun
    groups: int
    local_stride: int
    blob_stride: int


def fold(runs: Iterable[HeadRun]) -> list[Box]:
    """Fold runs into boxes of one fragment size and one number of fragments.

    The bytes moved are those of *runs*, each as often as there.
    """
    boxes = _group(_progressions(_join(runs)))
    if not boxes:
        return []
    nbytes = math.gcd(*(box.run.fragment_bytes for box in boxes))
    boxes = [part for box in boxes for part in _split_fragments(box, nbytes)]
    fragments = math.gcd(*(box.run.num_fragments for box in boxes))
    return [part for box in boxes for part in _split_groups(box, fragments)]


def _join(runs: Iterable[HeadRun]) -> list[HeadRun]:
    """Turn what is contiguous on both sides into single fragments."""
    joined: list[HeadRun] = []
    for each in runs:
        run = each
        if run.local_stride == run.blob_stride == run.fragment_bytes or run.num_fragments == 1:
            nbytes = run.fragment_bytes * run.num_fragments
            run = replace(
                run, fragment_bytes=nbytes, num_fragments=1, local_stride=nbytes, blob_stride=nbytes
            )
            last = joined[-1] if joined else None
            if (
                last is not None
                and last.num_fragments == 1
                and last.block_stride == run.block_stride
                and last.base_address + last.fragment_bytes == run.base_address
                and last.blob_offset + last.fragment_bytes == run.blob_offset
            ):
                nbytes += last.fragment_bytes
                joined[-1] = replace(
                    last, fragment_bytes=nbytes, local_stride=nbytes, blob_stride=nbytes
                )
                continue
        joined.append(run)
    return joined


def _shape(run: HeadRun) -> tuple[int, ...]:
    return (
        run.block_stride, run.fragment_bytes, run.num_fragments, run.local_stride, run.blob_stride
    )  # fmt: skip


def _progressions(runs: list[HeadRun]) -> list[HeadRun]:
    """Turn single fragments at equal distances into one run."""
    made: list[HeadRun] = []
    for box in _group(runs):
        if box.run.num_fragments == 1:
            made.append(
                replace(
                    box.run,
                    num_fragments=box.groups,
                    local_stride=box.local_stride,
                    blob_stride=box.blob_stride,
                )
            )
        else:
            made += _ungroup(box)
    return made


def _group(runs: list[HeadRun]) -> list[Box]:
    """Put neighbours of one shape at equal distances into one box."""
    boxes: list[Box] = []
    for run in runs:
        if boxes and _shape(boxes[-1].run) == _shape(run):
            box = boxes[-1]
            local, blob = (
                run.base_address - box.run.base_address,
                run.blob_offset - box.run.blob_offset,
            )
            if box.groups == 1:
                boxes[-1] = Box(box.run, 2, local, blob)
                continue
            if (local, blob) == (box.groups * box.local_stride, box.groups * box.blob_stride):
                boxes[-1] = replace(box, groups=box.groups + 1)
                continue
        boxes.append(Box(run, 1, run.fragment_bytes, run.fragment_bytes))
    return boxes


def _ungroup(box: Box) -> list[HeadRun]:
    return [
        replace(
            box.run,
            base_address=box.run.base_address + group * box.local_stride,
            blob_offset=box.run.blob_offset + group * box.blob_stride,
        )
        for group in range(box.groups)
    ]


def _split_fragments(box: Box, nbytes: int) -> list[Box]:
    """Return the same bytes in fragments of *nbytes*, a divisor of the box's fragments."""
    run, pieces = box.run, box.run.fragment_bytes // nbytes
    if pieces == 1:
        return [box]
    piece = replace(
        run, fragment_bytes=nbytes, num_fragments=pieces, local_stride=nbytes, blob_stride=nbytes
    )
    if run.num_fragments == 1:
        return [replace(box, run=piece)]
    return [
        Box(
            replace(piece, base_address=one.base_address, blob_offset=one.blob_offset),
            run.num_fragments,
            run.local_stride,
            run.blob_stride,
        )
        for one in _ungroup(box)
    ]


def _split_groups(box: Box, fragments: int) -> list[Box]:
    """Return the same bytes in groups of *fragments*, a divisor of the box's."""
    run, pieces = box.run, box.run.num_fragments // fragments
    if pieces == 1:
        return [box]
    return [
        Box(
            replace(one, num_fragments=fragments),
            pieces,
            fragments * run.local_stride,
            fragments * run.blob_stride,
        )
        for one in _ungroup(box)
    ]
