"""A worker's view of the arena: frames that it was told of, by header offset and generation.

No index, no policy: the owner (store.py) gave the frame out and keeps it from being reused until this worker is done.
A frame whose state word is not the one expected is simply not there any more; that is an answer, not an error.
"""

import threading

from . import format as fmt
from .arena import Arena
from .checksum import Algorithm, Verify, checksum

_PART_CHECKSUM_WORD = 3
_READS_DONE_ONE = 1 << 32
_WRITES_BEGUN, _WRITES_DONE, _READS_BEGUN, _READS_DONE = 3, 4, 5, 6


class Frames:
    """Reads and writes one rank's part of frames, and says so in the arena.

    Attributes:
        address: where the arena is mapped in this process; offsets below count from it.
        verified_blobs, checksum_mismatches, stale_frames: parts compared with their checksum, compared in vain, and
            frames that were gone when a copy was to begin.

    Threads: any number. Ownership: the arena stays the caller's, and must be attached.
    """

    def __init__(self, arena: Arena, rank: int, *, verify: str = "always") -> None:
        self.address = arena.address
        self.verified_blobs = 0
        self.checksum_mismatches = 0
        self.stale_frames = 0
        self._buffer = arena.buffer
        self._words = arena.words
        self._part = fmt.HEADER_FIXED_BYTES + rank * fmt.PART_BYTES
        self._attach = arena.attach_word
        self._verify = Verify(verify)
        self._reads = 0
        # header and generation of parts whose writing began and has not ended
        self._begun: set[tuple[int, int]] = set()
        # guards the attach slot, the first word of this rank's parts, and the counts above
        self._lock = threading.Lock()

    def begin_write(self, header: int, generation: int) -> tuple[int, int] | None:
        """Return (arena offset, bytes) of this rank's part of a frame being written; None if the frame is gone.

        After an answer that is not None, exactly one of :meth:`finish_write` and :meth:`fail_write` must follow.
        """
        with self._lock:
            self._words[self._attach + _WRITES_BEGUN] += 1
        # the count before the look, and a lock's fence between them: a new owner sees one of the two
        with self._lock:
            if self._words[header // 8] != generation << 8 | fmt.State.WRITING:
                self._words[self._attach + _WRITES_DONE] += 1
                self.stale_frames += 1
                return None
            self._begun.add((header, generation))
        return self._place(header)

    def finish_write(self, header: int, generation: int) -> bool:
        """Checksum the part and mark it ready; False if the frame is gone."""
        offset, size = self._place(header)
        value, algorithm = 0, Algorithm.NONE
        if self._verify is not Verify.OFF:
            value, algorithm = checksum(self._buffer[offset : offset + size]), Algorithm.XXH3_64
        return self._end_write(header, generation, fmt.PartState.READY, algorithm, value)

    def fail_write(self, header: int, generation: int) -> None:
        """Mark the part failed, begun or not: the owner will not publish the frame."""
        self._end_write(header, generation, fmt.PartState.FAILED, Algorithm.NONE, 0)

    def begin_read(self, header: int, generation: int) -> tuple[int, int] | None:
        """Return (arena offset, bytes) of this rank's part; None if the frame is gone or its bytes are not intact.

        Whatever the answer, :meth:`finish_read` must follow once.
        """
        with self._lock:
            self._words[self._attach + _READS_BEGUN] += 1
            self._reads += 1
            number = self._reads
        if not self._is_ready(header, generation):
            with self._lock:
                self.stale_frames += 1
            return None
        offset, size = self._place(header)
        first = self._words[(header + self._part) // 8]
        if first >> 16 & 0xFF != fmt.PartState.READY:
            return None
        has_checksum = first >> 24 & 0xFF == Algorithm.XXH3_64
        if not has_checksum and self._verify is Verify.ALWAYS:
            # stored by somebody who makes none, or the byte that says so is damaged
            return None
        if has_checksum and self._verify.wants(number):
            stored = self._words[(header + self._part) // 8 + _PART_CHECKSUM_WORD]
            intact = checksum(self._buffer[offset : offset + size]) == stored
            with self._lock:
                self.verified_blobs += 1
                self.checksum_mismatches += not intact
            if not intact:
                return None
        return offset, size

    def finish_read(self, header: int, generation: int, *, ok: bool) -> None:
        """Tell the owner that this rank no longer reads the frame; *ok* False marks the frame BAD for everybody."""
        with self._lock:
            self._words[self._attach + _READS_DONE] += 1
            if header < 0 or self._words[header // 8] >> 8 != generation:
                return
            if not ok and self._is_ready(header, generation):
                self._words[header // 8] = generation << 8 | fmt.State.BAD
                # after the mark: the owner looks at the frames it lent when this count has moved
                self._words[self._attach + fmt.ATTACH_BAD_WORD] += 1
            word = (header + self._part) // 8
            self._words[word] = (self._words[word] + _READS_DONE_ONE) & 0xFFFF_FFFF_FFFF_FFFF

    def _is_ready(self, header: int, generation: int) -> bool:
        return header >= 0 and self._words[header // 8] == generation << 8 | fmt.State.READY

    def _place(self, header: int) -> tuple[int, int]:
        words, part = self._words, (header + self._part) // 8
        return words[header // 8 + fmt.HEADER_BLOB_WORD] + words[part + 1], words[part + 2]

    def _end_write(
        self, header: int, generation: int, state: fmt.PartState, algorithm: Algorithm, value: int
    ) -> bool:
        with self._lock:
            if (header, generation) in self._begun:
                self._begun.remove((header, generation))
                self._words[self._attach + _WRITES_DONE] += 1
            if self._words[header // 8] != generation << 8 | fmt.State.WRITING:
                return False
            word = (header + self._part) // 8
            self._words[word + _PART_CHECKSUM_WORD] = value
            rank = self._words[word] & 0xFFFF
            self._words[word] = rank | state << 16 | algorithm << 24
            return True
