"""Spans of slabs: never overlap, fit their frames, are read back as they were written."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.spans import (
    MAX_SPAN_SLABS,
    MAX_WASTE,
    SizeKey,
    Spans,
    frames_in,
    read_spans,
    slabs_for,
)

from .chunks import KIB, MIB

SLAB = 64 * KIB
SLABS = 24
DATA = 16 * KIB

sizes = st.builds(
    SizeKey,
    st.integers(1, 400).map(lambda pages: pages * fmt.PAGE),
    st.sampled_from([fmt.header_bytes(parts) for parts in (1, 2, 8, 64)]),
)


def fake_arena():
    """Bytes with a span table and slabs, and nothing else; poisoned, so that what is not written shows."""
    memory = bytearray(b"\xa5" * (DATA + SLABS * SLAB))
    memory[8 * KIB : DATA] = bytes(8 * KIB)
    view = memoryview(memory)
    return SimpleNamespace(
        buffer=view, words=view.cast("Q"), span_table=8 * KIB, slab_bytes=SLAB, slab_count=SLABS, data=DATA
    )  # fmt: skip


def reread(arena):
    return list(read_spans(arena.buffer, arena.span_table, SLAB, SLABS, DATA))


def same(one, two):
    return [(s.first, s.slabs, s.size, s.frame_count, s.headers, s.frames) for s in one] == [
        (s.first, s.slabs, s.size, s.frame_count, s.headers, s.frames) for s in two
    ]


@given(sizes, st.integers(1, 64).map(lambda slabs: slabs * SLAB))
def test_as_many_frames_as_fit(size, span_bytes):
    def needed(count):
        return fmt.round_up(count * size.header_bytes, fmt.PAGE) + count * size.frame_bytes

    count = frames_in(span_bytes, size)
    assert needed(count) <= span_bytes < needed(count + 1)


@given(sizes, st.integers(1, 200))
def test_a_span_holds_a_frame_and_wastes_little(size, slab_count):
    slabs = slabs_for(size, SLAB, slab_count)
    if slabs == 0:
        assert frames_in(slab_count * SLAB, size) == 0 or slab_count > MAX_SPAN_SLABS
        return
    assert 1 <= slabs <= slab_count
    count = frames_in(slabs * SLAB, size)
    assert count
    waste = 1 - count * size.frame_bytes / (slabs * SLAB)
    fewer = [frames_in(n * SLAB, size) * size.frame_bytes / (n * SLAB) for n in range(1, slabs)]
    assert all(1 - used > max(waste, MAX_WASTE) for used in fewer), "fewer slabs would have done"


@pytest.mark.parametrize(
    ("frame_bytes", "slabs", "frames"),
    [
        pytest.param(4 * KIB, 1, 62, id="4KiB"),
        pytest.param(128 * KIB, 8, 15, id="half-a-slab"),
        pytest.param(256 * KIB, 16, 15, id="a-slab"),
        pytest.param(252 * KIB, 1, 1, id="a-slab-less-its-header"),
        pytest.param(5 * MIB, 21, 1, id="large"),
        pytest.param(17 * MIB, 69, 1, id="larger-than-64-slabs"),
    ],
)
def test_spans_of_usual_frames(frame_bytes, slabs, frames):
    size = SizeKey(frame_bytes, fmt.header_bytes(1))
    assert slabs_for(size, 256 * KIB, 1000) == slabs
    assert frames_in(slabs * 256 * KIB, size) == frames


@pytest.mark.parametrize("frame_bytes", [SLABS * SLAB, SLABS * SLAB - 1, 1 << 40])
def test_a_frame_that_can_never_fit(frame_bytes):
    size = SizeKey(fmt.round_up(frame_bytes, fmt.PAGE), 128)
    assert slabs_for(size, SLAB, SLABS) == 0
    assert Spans(fake_arena()).slabs_for(size) == 0


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_spans_never_overlap_and_are_read_back(data):
    arena = fake_arena()
    spans = Spans(arena)
    live = []
    for _ in range(data.draw(st.integers(1, 30), label="steps")):
        if live and data.draw(st.booleans(), label="free"):
            span = live.pop(data.draw(st.integers(0, len(live) - 1), label="which"))
            spans.free(span)
        else:
            size = data.draw(st.none() | sizes, label="size")
            slabs = data.draw(st.integers(1, 8)) if size is None else spans.slabs_for(size)
            first = spans.find_free(slabs) if slabs else None
            taken = {slab for span in live for slab in range(span.first, span.first + span.slabs)}
            runs = [n for n in range(SLABS - slabs + 1) if not taken & set(range(n, n + slabs))]
            assert first == (runs[0] if slabs and runs else None)
            if first is None:
                continue
            span = spans.assign(first, slabs, size)
            live.append(span)
            assert all(arena.words[header // 8] & 0xFF == 0 for header, _ in span.slots())
        live.sort(key=lambda span: span.first)
        assert same(spans.all(), live)
        assert same(reread(arena), live)
        assert same(Spans(arena).all(), live)

    bounds = []
    for span in live:
        start = DATA + span.first * SLAB
        end = start + span.slabs * SLAB
        for header, frame in span.slots():
            bounds += [
                (header, header + span.size.header_bytes),
                (frame, frame + span.size.frame_bytes),
            ]
            assert header % 64 == 0
            assert (frame - DATA) % fmt.PAGE == 0
            assert start <= header < frame < frame + span.size.frame_bytes <= end
    bounds.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(bounds))


def test_the_smallest_free_run_is_found():
    spans = Spans(fake_arena())
    kept = [spans.assign(first, 2, None) for first in range(0, SLABS, 2)]
    assert spans.find_free(1) is None
    spans.free(kept[3])
    assert spans.find_free(3) is None
    assert spans.find_free(2) == 6
    spans.free(kept[4])
    assert spans.find_free(4) == 6
    assert spans.find_free(5) is None


def test_a_new_span_has_no_headers_of_another_time():
    arena = fake_arena()
    spans = Spans(arena)
    span = spans.assign(0, 4, SizeKey(4 * KIB, 128))
    assert not any(arena.buffer[span.headers : span.frames])
    arena.buffer[span.headers : span.frames] = b"\2" * (span.frames - span.headers)
    spans.free(span)
    again = spans.assign(0, 4, SizeKey(8 * KIB, 128))
    assert not any(arena.buffer[again.headers : again.frames])


@settings(max_examples=120, deadline=None)
@given(st.integers(0, SLABS * fmt.SPAN_ENTRY_BYTES - 1), st.integers(1, 255))
def test_any_flipped_byte_leaves_spans_that_fit(at, flip):
    arena = fake_arena()
    spans = Spans(arena)
    for size in (4 * KIB, 76 * KIB, 32 * KIB):
        key = SizeKey(size, 128)
        slabs = spans.slabs_for(key)
        spans.assign(spans.find_free(slabs), slabs, key)
    spans.assign(spans.find_free(2), 2, None)
    arena.buffer[arena.span_table + at] ^= flip
    taken = 0
    for span in reread(arena):
        assert span.first >= taken
        taken = span.first + span.slabs
        assert taken <= SLABS
        for header, frame in span.slots():
            assert header + span.size.header_bytes <= frame
            assert frame + span.size.frame_bytes <= DATA + taken * SLAB
