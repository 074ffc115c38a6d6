"""The owner's books: frames by key, free places, index and headers, kept in step with the arena.

The private half of the store. Each method leaves headers, index and records agreeing; store.py has the verbs.
"""

from collections import deque

import xxhash

from . import format as fmt
from .arena import Arena
from .checksum import Algorithm, Verify, empty_parts
from .frame import Frame, SizeClass, Slot
from .index import MAX_LOAD, Index
from .policy import POLICIES
from .recovery import Found, scan
from .space import Space
from .spans import Span

# plain numbers: they are used for every blob
_READY, _WRITING = int(fmt.State.READY), int(fmt.State.WRITING)

EVICTED_KEPT = 65_536
"""Keys of evicted frames that are remembered, at the most."""


class Ledger:
    """What the owner of an arena knows. Threads: one."""

    def __init__(
        self, arena: Arena, namespace: bytes, parts: int, verify: Verify, eviction: str
    ) -> None:
        self.arena = arena
        self.namespace = namespace
        self.parts = parts
        self.step = 0
        self.counts = dict.fromkeys(
            ("committed", "aborted", "evicted", "bad", "deleted", "no_room", "verified", "recovered",
             "discarded", "resets"), 0,
        )  # fmt: skip
        self._verify = verify
        self._is_always = verify is Verify.ALWAYS
        self._is_never = verify is Verify.OFF
        self._algorithm = int(Algorithm.NONE if verify is Verify.OFF else Algorithm.XXH3_64)
        self._words = arena.words
        self._buffer = arena.buffer
        self._by_namespace: dict[bytes, dict[bytes, Frame]] = {namespace: {}}
        self.frames = self._by_namespace[namespace]
        self._evicted: deque[bytes] = deque(maxlen=EVICTED_KEPT)
        self._orphans: dict[Frame, None] = {}
        self._quarantine: list[Slot] = []
        self._strangers: list[tuple[int, int]] = []
        self._leased: set[Frame] = set()
        self._pins: dict[Frame, int] = {}
        self._bad_words: list[int] = []
        self._bad_seen = 0
        self._attach_seen = -1
        self._reads = 0
        self._plans: dict[int, tuple[SizeClass, bytes]] = {}
        # one count for generations, which must never repeat, and for the order of uses
        self._clock = arena.take_ownership() << fmt.GENERATION_COUNT_BITS
        self._space = Space(arena, POLICIES[eviction], self._evict, self._is_held)
        first_index = fmt.round_up(
            arena.span_table + arena.slab_count * fmt.SPAN_ENTRY_BYTES, fmt.PAGE
        )
        self._index = Index(arena)
        self._index_span: Span | None = None
        self._index.rebuild((), first_index, fmt.INDEX_SLOTS_MIN)
        self._recover()

    def _plan(self, blob_bytes: int) -> tuple[SizeClass, bytes] | None:
        plan = self._plans.get(blob_bytes)
        if plan is None:
            if blob_bytes <= 0 or blob_bytes % self.parts:
                raise ValueError(
                    f"blob_bytes must be a positive multiple of {self.parts} parts; got {blob_bytes}"
                )
            size_class = self._space.class_of(blob_bytes, self.parts)
            if size_class is None:
                return None
            plan = self._plans[blob_bytes] = size_class, empty_parts(blob_bytes, self.parts)
        return plan

    def _claim(self, key: bytes, size_class: SizeClass, blob_bytes: int) -> Frame | None:
        index, free = self._index, size_class.free
        slot = free.pop() if free and index.room > 0 else self._find_slot(size_class)
        if slot is None:
            self.counts["no_room"] += 1
            return None
        self._clock = generation = self._clock + 1
        namespace = self.namespace
        tag = fmt.key_tag(namespace, key)
        frame = Frame(key, namespace, slot, blob_bytes, generation << 8 | _READY, tag, 0, False)
        index.promised += 1
        index.room -= 1
        self._words[slot.word] = generation << 8 | _WRITING
        self.frames[key] = frame
        return frame

    def _find_slot(self, size_class: SizeClass) -> Slot | None:
        """Return a place that is free now; None if there is none, or no room in the index."""
        if self._index.room <= 0:
            self._grow_index()
        if self._index.is_full:
            return None
        return size_class.free.pop() if size_class.free else self._space.take(size_class)

    def _write_header(self, frame: Frame, tokens: int, now: int, parts: bytes) -> None:
        slot, key = frame.slot, frame.key
        body = fmt.HEADER_BODY.pack(
            key, frame.namespace, tokens, slot.offset, frame.blob_bytes, now,
            fmt.HEADER_MAGIC, fmt.FORMAT_VERSION, len(key), self.parts,
        )  # fmt: skip
        start = slot.header + 8
        check = xxhash.xxh32_intdigest(body).to_bytes(4, "little")
        self._buffer[start : start + 88 + len(parts)] = body + check + parts

    def _publish(self, frame: Frame) -> None:
        frame.is_writing = False
        frame.is_ready = True
        self._space.changes += 1
        slot, ready = frame.slot, frame.ready
        self._words[slot.word] = ready
        self._index.insert(frame.tag, slot.place | ready >> 8 & fmt.PLACE_GENERATION_MASK)
        self._clock = frame.tick = self._clock + 1
        slot.size_class.policy.add(frame)

    def _is_held(self, frame: Frame) -> bool:
        return frame.leases > 0 or frame.step == self.step

    def _evict(self, frame: Frame) -> None:
        self.counts["evicted"] += 1
        if frame.namespace == self.namespace:
            self._evicted.append(frame.key)
        self._free(frame)

    def _free(self, frame: Frame, among: dict[bytes, Frame] | None = None) -> None:
        self._unlist(frame, self._by_namespace[frame.namespace] if among is None else among)
        self._give_back(frame)

    def _unlist(self, frame: Frame, among: dict[bytes, Frame]) -> None:
        if among.get(frame.key) is frame:
            del among[frame.key]
        if frame.is_writing:
            self._index.promise(-1)
        else:
            self._index.remove(frame.tag, frame.place)
            frame.slot.size_class.policy.remove(frame)

    def _give_back(self, frame: Frame) -> None:
        frame.is_writing = frame.is_ready = False
        self._space.held.discard(frame)
        self._space.changes += 1
        self._words[frame.word] = frame.generation << 8
        frame.slot.size_class.free.append(frame.slot)

    def _free_orphan(self, frame: Frame) -> None:
        del self._orphans[frame]
        self._leased.discard(frame)
        self._give_back(frame)

    def _is_sampled(self) -> bool:
        self._reads += 1
        return self._verify.wants(self._reads)

    def _is_unchecked(self, frame: Frame) -> bool:
        """Say whether *frame*, whose checksum does not match, has none; otherwise it is found corrupt."""
        algorithm = self._buffer[frame.header + fmt.HEADER_FIXED_BYTES + 3]
        if algorithm == Algorithm.NONE and self._verify is not Verify.ALWAYS:
            return True
        self._words[frame.word] = frame.generation << 8 | fmt.State.BAD
        frame.is_ready = False
        if frame.leases == 0:
            self._free(frame)
            self.counts["bad"] += 1
        return False

    def _is_done(self, frame: Frame) -> bool:
        if frame in self._pins:
            return False
        parts = [
            fmt.PART.unpack_from(
                self._buffer, frame.header + fmt.HEADER_FIXED_BYTES + n * fmt.PART_BYTES
            )
            for n in range(self.parts)
        ]
        if frame.is_writing:
            return all(state != fmt.PartState.EMPTY for _, state, *_ in parts)
        return all(reads == frame.reads & 0xFFFFFFFF for _, _, _, reads, *_ in parts)

    def _grow_index(self, *, evict: bool = True) -> None:
        """Make the index roomy again; if there are no slabs to be had it stays crowded."""
        index = self._index
        offset, slots, span = index.offset, index.slots, self._index_span
        if index.used + index.promised > slots * MAX_LOAD / 2:
            slab_bytes = self.arena.slab_bytes
            slabs = -(-2 * slots * fmt.INDEX_SLOT_BYTES // slab_bytes)
            span = self._space.take_slabs(slabs, evict=evict)
            if span is None:
                return
            offset = span.headers
            slots = 1 << (slabs * slab_bytes // fmt.INDEX_SLOT_BYTES).bit_length() - 1
        index.rebuild(
            (
                (frame.tag, frame.place)
                for frames in self._by_namespace.values()
                for frame in frames.values()
                if not frame.is_writing
            ),
            offset, slots,
        )  # fmt: skip
        if self._index_span is not None and span is not self._index_span:
            self._space.spans.free(self._index_span)
        self._index_span = span

    def _recover(self) -> None:
        """Take in the frames that rest in the arena; what was being written is free, once nobody can write it."""
        resting: list[tuple[Found, Slot]] = []
        unsettled: list[Slot] = []
        for span in self._space.spans.all():
            if span.size is None:
                self._space.spans.free(span)
                continue
            size_class = self._space.adopt(span)
            in_use = {found.header: found for found in scan(self.arena, span)}
            for header, offset in span.slots():
                slot, found = Slot(header, offset, span, size_class), in_use.get(header)
                if found is None:
                    size_class.free.append(slot)
                elif found.state == fmt.State.READY:
                    resting.append((found, slot))
                else:
                    # whoever may still write it does not begin any more; who has begun is among the strangers
                    self._words[slot.word] = found.generation << 8 | fmt.State.BAD
                    unsettled.append(slot)
        self.counts["discarded"] += len(unsettled)
        self._strangers = self.arena.strangers()
        self._quarantine = unsettled
        self._space.quarantined.update(slot.span for slot in unsettled)
        self._lift_quarantine()
        for found, slot in sorted(resting, key=lambda r: (r[0].time, r[0].generation)):
            self._restore(found, slot)

    def _lift_quarantine(self) -> None:
        """Free what an earlier owner's workers might have written, if there is none of them any more."""
        if self._strangers:
            there = self.arena.strangers()
            self._strangers = [stranger for stranger in self._strangers if stranger in there]
        if not self._strangers:
            for slot in self._quarantine:
                self._words[slot.word] = fmt.State.FREE
                slot.size_class.free.append(slot)
            self._quarantine.clear()
            self._space.quarantined.clear()

    def _can_be_verified(self, found: Found) -> bool:
        """Say whether a resting frame keeps what *verify* promises: one that was stored under "off" has no checksum."""
        first = found.header + fmt.HEADER_FIXED_BYTES + 3
        last = first + found.parts * fmt.PART_BYTES
        algorithms = self._buffer[first : last : fmt.PART_BYTES]
        return self._verify is not Verify.ALWAYS or Algorithm.NONE not in algorithms.tolist()

    def _restore(self, found: Found, slot: Slot) -> None:
        frames = self._by_namespace.setdefault(found.namespace, {})
        if self._index.room <= 0:
            # what is not restored yet looks like free room to an eviction
            self._grow_index(evict=False)
        usable = found.namespace != self.namespace or (
            found.parts == self.parts and self._can_be_verified(found)
        )
        if found.key in frames or self._index.is_full or not usable:
            self.counts["discarded"] += 1
            self._words[slot.word] = fmt.State.FREE
            slot.size_class.free.append(slot)
            return
        self._clock += 1
        tag = fmt.key_tag(found.namespace, found.key)
        ready = self._clock << 8 | fmt.State.READY
        frame = Frame(found.key, found.namespace, slot, found.blob_bytes, ready, tag, 0, False)
        frames[found.key] = frame
        self._publish(frame)
        # reads that this owner did not grant do not count; from here on those under way end in an earlier life
        for part in range(found.parts):
            word = (found.header + fmt.HEADER_FIXED_BYTES + part * fmt.PART_BYTES) // 8
            self._words[word] &= 0xFFFF_FFFF
        self.counts["recovered"] += 1
