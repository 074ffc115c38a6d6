"""Room for frames: free places first, then free slabs, then what is given up.

Giving up is least-recently-used within a size. Across sizes a whole span changes hands, when its frames were on average
last used before the frame that the needy size would otherwise give up, or when the needy size has nothing to give.
"""

from collections.abc import Callable

from . import format as fmt
from .arena import Arena
from .frame import Frame, SizeClass, Slot
from .policy import Policy
from .spans import SizeKey, Span, Spans

LOOK_EVERY = 64
"""Victims of one size between two looks at the other sizes; a look costs about 0.1 us a frame."""


class Space:
    """Places of all sizes in one arena. Threads: the owner's one thread."""

    def __init__(
        self,
        arena: Arena,
        new_policy: Callable[[], Policy],
        evict: Callable[[Frame], None],
        is_held: Callable[[Frame], bool],
    ) -> None:
        self.spans = Spans(arena)
        self.classes: dict[SizeKey, SizeClass] = {}
        self._arena = arena
        self._new_policy = new_policy
        self._evict = evict
        self._is_held = is_held
        # moves whenever something that was held may no longer be
        self.changes = 0
        # in use and in no policy: being written, or left over from before a reset
        self.held: set[Frame] = set()
        self.quarantined: set[Span] = set()

    def class_of(self, blob_bytes: int, part_count: int) -> SizeClass | None:
        """Return the size class of such a blob; None if no span of this arena could ever hold one."""
        size = SizeKey(fmt.round_up(blob_bytes, fmt.PAGE), fmt.header_bytes(part_count))
        found = self.classes.get(size)
        if found is None and self.spans.slabs_for(size):
            found = self.classes[size] = SizeClass(size, self._new_policy())
        return found

    def adopt(self, span: Span) -> SizeClass:
        """Take in a span that was there before; its free places are the caller's to add."""
        assert span.size is not None
        size_class = self.classes.get(span.size)
        if size_class is None:
            size_class = self.classes[span.size] = SizeClass(span.size, self._new_policy())
        size_class.spans.append(span)
        return size_class

    def take(self, size_class: SizeClass) -> Slot | None:
        """Return a free place, giving something up if need be; None if everything is held."""
        if not size_class.free and size_class.barren_at == self.changes:
            # looked through in vain, and nothing was let go of since
            return None
        while not size_class.free:
            if not (self._grow(size_class) or self._give_up(size_class)):
                size_class.barren_at = self.changes
                return None
        return size_class.free.pop()

    def free_bytes(self) -> int:
        """Return the bytes of free places, and of free slabs if some size could use them."""
        classes = self.classes.values()
        places = sum(len(c.free) * c.size.frame_bytes for c in classes)
        least = min((self.spans.slabs_for(c.size) for c in classes), default=1)
        if self.spans.find_free(least) is None:
            return places
        free_slabs: int = self._arena.slab_bytes * self.spans.by_slab.count(None)
        return places + free_slabs

    def take_slabs(self, slabs: int, *, evict: bool) -> Span | None:
        """Return a span of *slabs* slabs for an index, or None."""
        first = self.spans.find_free(slabs)
        if first is None and not evict:
            return None
        if first is None:
            window = self._coldest_window(slabs, None)
            if window is None:
                return None
            first = self._clear(window[0], slabs)
        return self.spans.assign(first, slabs, None)

    def _grow(self, size_class: SizeClass) -> bool:
        slabs = self.spans.slabs_for(size_class.size)
        first = self.spans.find_free(slabs)
        if first is not None:
            self._assign(first, slabs, size_class)
        return first is not None

    def _assign(self, first: int, slabs: int, size_class: SizeClass) -> None:
        span = self.spans.assign(first, slabs, size_class.size)
        size_class.spans.append(span)
        # taken from the end: lowest addresses first
        size_class.free[:0] = [
            Slot(header, offset, span, size_class) for header, offset in span.slots()
        ][::-1]

    def _give_up(self, size_class: SizeClass) -> bool:
        own = size_class.policy.victim(self._is_held)
        size_class.victims_since_look += 1
        if own is None or (len(self.classes) > 1 and size_class.victims_since_look >= LOOK_EVERY):
            size_class.victims_since_look = 0
            slabs = self.spans.slabs_for(size_class.size)
            window = self._coldest_window(slabs, size_class)
            if window is not None and (own is None or window[1] < own.tick):
                self._assign(self._clear(window[0], slabs), slabs, size_class)
                return True
        if own is None:
            return False
        self._evict(own)
        return True

    def _coldest_window(self, slabs: int, asking: SizeClass | None) -> tuple[int, float] | None:
        """Return (first slab, mean tick of its frames) of the run that was used least recently."""
        heat = self._heat(asking)
        best: tuple[int, float] | None = None
        by_slab = self.spans.by_slab
        for first in range(len(by_slab) - slabs + 1):
            run = {span for span in by_slab[first : first + slabs] if span}
            temperatures = [heat.get(span) for span in run]
            if any(t is None for t in temperatures):
                continue
            hottest = max((t for t in temperatures if t is not None), default=0.0)
            if best is None or hottest < best[1]:
                best = (first, hottest)
        return best

    def _heat(self, asking: SizeClass | None) -> dict[Span, float]:
        """Return the mean tick of each span that may be taken, by span."""
        totals: dict[Span, list[int]] = {}
        for size_class in self.classes.values():
            if size_class is not asking:
                totals.update({span: [0, 0] for span in size_class.spans})
        for size_class in self.classes.values():
            if size_class is asking:
                continue
            for frame in size_class.policy.frames():
                total = totals.get(frame.slot.span)
                if total is None:
                    continue
                if self._is_held(frame):
                    del totals[frame.slot.span]
                    continue
                total[0] += frame.tick
                total[1] += 1
        for frame in self.held:
            totals.pop(frame.slot.span, None)
        for span in self.quarantined:
            totals.pop(span, None)
        return {span: total / count if count else 0.0 for span, (total, count) in totals.items()}

    def _clear(self, first: int, slabs: int) -> int:
        """Give up all frames of the spans that touch a run of slabs, free these spans; return *first*."""
        spans = {s for s in self.spans.by_slab[first : first + slabs] if s}
        for size_class in list(self.classes.values()):
            mine = [span for span in size_class.spans if span in spans]
            if not mine:
                continue
            for frame in [f for f in size_class.policy.frames() if f.slot.span in spans]:
                self._evict(frame)
            size_class.free = [s for s in size_class.free if s.span not in spans]
            size_class.spans = [s for s in size_class.spans if s not in spans]
        for span in spans:
            self.spans.free(span)
        self.changes += 1
        return first
