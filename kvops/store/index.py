"""The index: open addressing in the arena itself, one writer, readers in any process and without a message.

A slot points to a frame header; the header holds the whole key and is the truth. So a reader that meets a slot in the
middle of a change finds a header that does not match, and misses. Layout: format.py.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence

from . import format as fmt
from .arena import Arena

_EMPTY = 0
_DELETED = 1
_HEADER_KEY = struct.Struct("<36s16sIQ")

MAX_LOAD = 0.66
"""Share of slots in use (deleted ones included) at which an index is rebuilt."""


class Index:
    """The writer's side. Threads: the owner's one thread."""

    def __init__(self, arena: Arena) -> None:
        self._words = arena.words
        self._buffer = arena.buffer
        self.promised = 0
        self._load()

    def _load(self) -> None:
        self.offset = self._words[fmt.INDEX_OFFSET_WORD]
        self.slots = self._words[fmt.INDEX_SLOTS_WORD]
        self._base = self.offset // 8
        self._mask = self.slots - 1
        self._limit = int(self.slots * MAX_LOAD)
        self.deleted = 0
        # insertions until it should be rebuilt; may be negative
        self.room = self._limit - self.promised

    @property
    def used(self) -> int:
        """Slots that point somewhere."""
        return self._limit - self.room - self.deleted - self.promised

    @property
    def is_full(self) -> bool:
        """Whether one more insertion or promise could leave no empty slot, at which searches end."""
        return self._limit - self.room >= self.slots - 1

    def promise(self, count: int) -> None:
        """Set room for *count* insertions aside (negative: give it back), for frames that are not ready yet."""
        self.promised += count
        self.room -= count

    def insert(self, tag: int, place: int) -> None:
        """Add a slot; the caller knows that the key is not in the index and that there is room."""
        words = self._words
        word = self._base + 2 * (tag & self._mask)
        if words[word]:
            word = self._usable(tag)
        words[word + 1] = place
        words[word] = tag
        self.room -= 1

    def _usable(self, tag: int) -> int:
        """Return the word of the first slot on the way of *tag* that is empty or deleted."""
        words, base, mask = self._words, self._base, self._mask
        slot = tag & mask
        while words[base + 2 * slot] > _DELETED:
            slot = (slot + 1) & mask
        if words[base + 2 * slot] == _DELETED:
            # it was counted when it was filled first
            self.deleted -= 1
            self.room += 1
        return base + 2 * slot

    def remove(self, tag: int, place: int) -> bool:
        """Delete the slot of *tag* that points to *place*; return whether there was one."""
        words, base, mask = self._words, self._base, self._mask
        slot = tag & mask
        while (found := words[base + 2 * slot]) != _EMPTY:
            if found == tag and words[base + 2 * slot + 1] == place:
                break
            slot = (slot + 1) & mask
        else:
            return False
        words[base + 2 * slot] = _DELETED
        self.deleted += 1
        # a deleted slot before an empty one separates nothing
        if words[base + 2 * ((slot + 1) & mask)] == _EMPTY:
            while words[base + 2 * slot] == _DELETED:
                words[base + 2 * slot] = _EMPTY
                self.deleted -= 1
                self.room += 1
                slot = (slot - 1) & mask
        return True

    def rebuild(self, entries: Iterable[tuple[int, int]], offset: int, slots: int) -> None:
        """Write the index anew at *offset* with *slots* slots, from (tag, place) pairs.

        Readers that look meanwhile miss.
        """
        words = self._words
        # an owner that died in here left it odd
        changing = words[fmt.INDEX_SEQUENCE_WORD] | 1
        words[fmt.INDEX_SEQUENCE_WORD] = changing
        words[fmt.INDEX_OFFSET_WORD] = offset
        words[fmt.INDEX_SLOTS_WORD] = slots
        self._load()
        size = slots * fmt.INDEX_SLOT_BYTES
        self._buffer[offset : offset + size] = bytes(size)
        for tag, place in entries:
            self.insert(tag, place)
        words[fmt.INDEX_SEQUENCE_WORD] = changing + 1 & 0xFFFF_FFFF_FFFF_FFFF


class Reader:
    """The readers' side: looks keys up in an arena that another process owns.

    Threads: any. It takes no lease: what it returns may be gone the next moment, and whoever reads the blob must check
    the state word again afterwards.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[tuple[int, int, int] | None]:
        """Return (header offset, blob offset, generation) of each key's ready frame, or None."""
        words = self._arena.words
        before = words[fmt.INDEX_SEQUENCE_WORD]
        if before & 1:
            return [None] * len(keys)
        base, mask = words[fmt.INDEX_OFFSET_WORD] // 8, words[fmt.INDEX_SLOTS_WORD] - 1
        # place of one index and size of another: it was replaced between the two
        if base + 2 * (mask + 1) > len(words):
            return [None] * len(keys)
        found = [self._find(namespace, key, base, mask) for key in keys]
        return found if words[fmt.INDEX_SEQUENCE_WORD] == before else [None] * len(keys)

    def _find(
        self, namespace: bytes, key: bytes, base: int, mask: int
    ) -> tuple[int, int, int] | None:
        padded = key.ljust(fmt.KEY_BYTES_MAX, b"\0")
        for place in self._places(fmt.key_tag(namespace, key), base, mask):
            header = place >> fmt.PLACE_GENERATION_BITS << 6
            if header + fmt.HEADER_FIXED_BYTES > self._arena.arena_bytes:
                continue
            # a load of 8 bytes; unpacking goes byte by byte
            word = self._arena.words[header // 8]
            stored, owner, _, blob = _HEADER_KEY.unpack_from(self._arena.buffer, header + 8)
            same = stored == padded and owner == namespace
            if same and word & 0xFF == fmt.State.READY and self._arena.words[header // 8] == word:
                return header, blob, word >> 8
        return None

    def _places(self, tag: int, base: int, mask: int) -> Iterator[int]:
        words = self._arena.words
        slot = tag & mask
        for _ in range(mask + 1):
            found = words[base + 2 * slot]
            if found == _EMPTY:
                return
            if found == tag:
                yield words[base + 2 * slot + 1]
            slot = (slot + 1) & mask
