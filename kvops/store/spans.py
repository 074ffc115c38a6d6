"""Spans: which slabs hold frames of which size.

Frames of one size share spans of slabs. A span that is empty goes back and can become another size's, so that engines
with different models, and the groups of a hybrid model, live in one arena and none of them starves.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from . import format as fmt
from .arena import Arena

MAX_WASTE = 1 / 16
"""A span takes as many slabs (up to 64) as it needs to waste no more than this at its end."""

MAX_SPAN_SLABS = 64


@dataclass(frozen=True, slots=True)
class SizeKey:
    """What frames of one span have in common: bytes of a frame and of its header."""

    frame_bytes: int
    header_bytes: int


@dataclass(slots=True, eq=False)
class Span:
    """A run of slabs in use.

    Attributes:
        first: its first slab. slabs: how many.
        size: what its frames look like; None for an index.
        frame_count: frames that fit.
        headers: offset of the first header. frames: offset of the first frame.
    """

    first: int
    slabs: int
    size: SizeKey | None
    frame_count: int
    headers: int
    frames: int

    def slots(self) -> Iterator[tuple[int, int]]:
        """Yield (header offset, frame offset) of each of its frames."""
        if self.size is None:
            return
        for number in range(self.frame_count):
            yield (
                self.headers + number * self.size.header_bytes,
                self.frames + number * self.size.frame_bytes,
            )


def frames_in(span_bytes: int, size: SizeKey) -> int:
    """Return how many frames, with their headers, fit into *span_bytes*."""
    count = span_bytes // (size.frame_bytes + size.header_bytes)
    while count and (
        fmt.round_up(count * size.header_bytes, fmt.PAGE) + count * size.frame_bytes > span_bytes
    ):
        count -= 1
    return count


def slabs_for(size: SizeKey, slab_bytes: int, slab_count: int) -> int:
    """Return how many slabs a span of *size* takes; 0 if not even all of them hold one frame."""
    best, best_waste = 0, 1.0
    least = -(-(size.frame_bytes + fmt.PAGE) // slab_bytes)
    for slabs in range(1, min(slab_count, max(MAX_SPAN_SLABS, least)) + 1):
        count = frames_in(slabs * slab_bytes, size)
        waste = 1 - count * size.frame_bytes / (slabs * slab_bytes)
        if count and waste < best_waste:
            best, best_waste = slabs, waste
        if best_waste <= MAX_WASTE:
            break
    return best


class Spans:
    """The span table of an arena. Threads: the owner's one thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._slabs_for: dict[SizeKey, int] = {}
        self.by_slab: list[Span | None] = [None] * arena.slab_count
        for span in read_spans(
            arena.buffer, arena.span_table, arena.slab_bytes, arena.slab_count, arena.data
        ):
            for slab in range(span.first, span.first + span.slabs):
                self.by_slab[slab] = span

    def all(self) -> list[Span]:
        """Return every span once."""
        return [span for slab, span in enumerate(self.by_slab) if span and span.first == slab]

    def slabs_for(self, size: SizeKey) -> int:
        """Return how many slabs a span of *size* takes here; 0 if a frame of that size can't exist here."""
        found = self._slabs_for.get(size)
        if found is None:
            found = slabs_for(size, self._arena.slab_bytes, self._arena.slab_count)
            self._slabs_for[size] = found
        return found

    def find_free(self, slabs: int) -> int | None:
        """Return the first slab of a free run of *slabs*, or None."""
        run = 0
        for slab, span in enumerate(self.by_slab):
            run = 0 if span else run + 1
            if run == slabs:
                return slab - slabs + 1
        return None

    def assign(self, first: int, slabs: int, size: SizeKey | None) -> Span:
        """Turn *slabs* free slabs from *first* on into a span of frames of *size* (None: of an index)."""
        arena = self._arena
        start = arena.data + first * arena.slab_bytes
        count = frames_in(slabs * arena.slab_bytes, size) if size else 0
        head = fmt.round_up(count * size.header_bytes, fmt.PAGE) if size else 0
        span = Span(first, slabs, size, count, start, start + head)
        # headers first: a crash here leaves free slabs, not headers of another time
        arena.buffer[start : start + head] = bytes(head)
        kind = fmt.SpanKind.FRAMES if size else fmt.SpanKind.INDEX
        for slab in reversed(range(first, first + slabs)):
            self.by_slab[slab] = span
            entry = (
                (
                    kind,
                    slabs,
                    size.frame_bytes if size else 0,
                    count,
                    size.header_bytes if size else 0,
                    0,
                )
                if slab == first
                else (fmt.SpanKind.CONTINUATION, 0, 0, 0, 0, 0)
            )
            fmt.SPAN_ENTRY.pack_into(arena.buffer, self._entry(slab), *entry)
        return span

    def free(self, span: Span) -> None:
        """Give the slabs of *span* back; its frames must be free."""
        for slab in range(span.first, span.first + span.slabs):
            self.by_slab[slab] = None
            self._arena.words[self._entry(slab) // 8] = fmt.SpanKind.FREE

    def _entry(self, slab: int) -> int:
        table: int = self._arena.span_table
        return table + slab * fmt.SPAN_ENTRY_BYTES


def read_spans(
    buffer: memoryview, span_table: int, slab_bytes: int, slab_count: int, data: int
) -> Iterator[Span]:
    """Yield the spans that a span table describes, and skip entries that contradict themselves."""
    slab = 0
    while slab < slab_count:
        kind, slabs, frame_bytes, count, header_bytes, _ = fmt.SPAN_ENTRY.unpack_from(
            buffer, span_table + slab * fmt.SPAN_ENTRY_BYTES
        )
        start = data + slab * slab_bytes
        fits = 0 < slabs <= slab_count - slab
        if kind == fmt.SpanKind.INDEX and fits:
            yield Span(slab, slabs, None, 0, start, start)
            slab += slabs
            continue
        if kind == fmt.SpanKind.FRAMES and fits and frame_bytes and header_bytes:
            size = SizeKey(frame_bytes, header_bytes)
            sane = not (frame_bytes % fmt.PAGE or header_bytes % 64)
            if sane and count == frames_in(slabs * slab_bytes, size):
                head = fmt.round_up(count * header_bytes, fmt.PAGE)
                yield Span(slab, slabs, size, count, start, start + head)
                slab += slabs
                continue
        slab += 1
