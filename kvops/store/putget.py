"""Put and get whole blobs in the owner's own process: reserve, copy and commit in one loop."""

import enum
import itertools
import time
from collections.abc import Sequence

import xxhash

from . import format as fmt
from .checksum import CHECKSUM_WORD
from .frame import Frame
from .ledger import Ledger

Blob = bytes | bytearray | memoryview
"""What holds the bytes of a blob; numpy arrays and tensors' numpy views do as well."""

# looked up once: put calls them for every blob
pack_body, pack_header, xxh32 = (
    fmt.HEADER_BODY.pack,
    fmt.BODY_CHECK_AND_PART.pack_into,
    xxhash.xxh32_intdigest,
)
_MAGIC, _VERSION = fmt.HEADER_MAGIC, fmt.FORMAT_VERSION
_KEY_MIN, _KEY_MAX = fmt.KEY_BYTES_MIN, fmt.KEY_BYTES_MAX


class Reserve(enum.Enum):
    """Why no frame was given."""

    EXISTS = "exists"
    PENDING = "pending"
    NO_ROOM = "no_room"


class PutGet(Ledger):
    """The verbs for callers that have the bytes at hand. Threads: one."""

    def put(
        self,
        keys: Sequence[bytes],
        blobs: Sequence["bytes | bytearray | memoryview"],
        *,
        tokens: int = 0,
    ) -> list[bool | Reserve]:
        """Store whole blobs of this process; True for each that was stored, or why not.

        Args:
            keys: as for :meth:`reserve`.
            blobs: one contiguous buffer of bytes for each key.
            tokens: as for :meth:`reserve`.

        Raises:
            ValueError: the store has more than one part, a key is malformed, a blob is empty, or *tokens* is out of
                range; others of the blobs may be stored.
            TypeError: a blob is not contiguous; others may be stored.
        """
        if self.parts != 1 or len(keys) != len(blobs):
            raise ValueError(
                f"put needs one part and a blob for each key; got {self.parts} parts, {len(keys)} keys, "
                f"{len(blobs)} blobs"
            )
        if tokens:
            fmt.check_tokens(tokens)
        frames, plans, namespace = self.frames, self._plans, self.namespace
        room, digest = self._index.room, xxhash.xxh3_64_intdigest
        out: list[bool | Reserve] = []
        made: list[Frame] = []
        copies: list[memoryview] = []
        # all that is small first, then all copies, then all headers: a copy drives everything else out of the caches
        try:
            for key, blob in zip(keys, blobs):  # noqa: B905 - compared above; a keyword costs 0.1 us
                data = blob if type(blob) is memoryview else memoryview(blob)
                if not data.c_contiguous:
                    raise TypeError(f"blobs must be contiguous; got strides {data.strides}")
                size = data.nbytes
                plan = plans.get(size) or self._plan(size)
                if not _KEY_MIN <= len(key) <= _KEY_MAX:
                    fmt.check_key(key)
                if key in frames:
                    known = self._existing(frames[key])
                    if known is not None:
                        out.append(known)
                        continue
                slot = None
                if plan is not None:
                    free = plan[0].free
                    if free and room > len(made):
                        slot = free.pop()
                    else:
                        # who makes room counts what is at rest, and must not see half of this call
                        self._fill(made, copies, tokens)
                        made, copies = [], []
                        slot = self._find_slot(plan[0])
                        room = self._index.room
                if slot is None:
                    self.counts["no_room"] += 1
                    out.append(Reserve.NO_ROOM)
                    continue
                self._clock = generation = self._clock + 1
                tag = digest(namespace + key)
                if tag < 2:
                    tag = 2
                frames[key] = frame = Frame(
                    key, namespace, slot, size, generation << 8 | 2, tag, generation, True
                )
                made.append(frame)
                copies.append(data)
                out.append(True)
            self._fill(made, copies, tokens)
        except BaseException:
            self._forget(made)
            raise
        return out

    def _fill(self, made: list[Frame], blobs: list[memoryview], tokens: int) -> None:
        """Copy *blobs* into new frames and publish them: nothing of a frame is in the arena before its last step."""
        if not made:
            return
        buffer, words, namespace = self._buffer, self._words, self.namespace
        insert, algorithm, digest = self._index.insert, self._algorithm, xxhash.xxh3_64_intdigest
        sums: list[int] | None = [] if algorithm else None
        for frame, blob in zip(made, blobs):  # noqa: B905 - made together; a keyword costs 0.1 us
            start = frame.slot.offset
            try:
                buffer[start : start + frame.blob_bytes] = blob
            except (ValueError, NotImplementedError):
                # another item type than bytes, or several dimensions
                buffer[start : start + frame.blob_bytes] = blob.cast("B")
            if sums is not None:
                sums.append(digest(blob))
        now = int(time.time())
        size_class = made[0].slot.size_class
        add = size_class.policy.add
        for frame, value in zip(made, sums or itertools.repeat(0)):  # noqa: B905 - as above
            key, slot, size, ready = frame.key, frame.slot, frame.blob_bytes, frame.ready
            body = pack_body(
                key, namespace, tokens, slot.offset, size, now, _MAGIC, _VERSION, len(key), 1
            )
            pack_header(
                buffer, slot.header + 8, body, xxh32(body), 0, 1, algorithm, 0, 0, size, value
            )
            # free until here: a crash on the way leaves nothing behind
            words[slot.word] = ready
            insert(frame.tag, slot.place | ready >> 8 & 0xFFFFFF)
            if slot.size_class is not size_class:
                size_class = slot.size_class
                add = size_class.policy.add
            add(frame)
        self.counts["committed"] += len(made)

    def _forget(self, made: list[Frame]) -> None:
        """Undo what a call began and did not publish."""
        for frame in made:
            if not frame.entries:
                self._index.remove(frame.tag, frame.place)
                self.frames.pop(frame.key, None)
                self._give_back(frame)

    def get(self, keys: Sequence[bytes], out: Sequence["bytearray | memoryview"]) -> list[bool]:
        """Copy whole blobs out; return which were there and intact. What is returned False for may be scribbled on.

        Args:
            keys: chunk keys.
            out: a writable buffer of exactly the blob's size for each key.

        Raises:
            ValueError: the store has more than one part, the lists differ in length, or a buffer has another size than its blob.
        """
        if self.parts != 1 or len(keys) != len(out):
            raise ValueError(
                f"get needs one part and a buffer for each key; got {self.parts} parts, {len(keys)} keys, "
                f"{len(out)} buffers"
            )
        buffer, words, get = self._buffer, self._words, self.frames.get
        digest, always, never = xxhash.xxh3_64_intdigest, self._is_always, self._is_never
        done = []
        checked = 0
        for key, target in zip(keys, out):  # noqa: B905 - compared above; a keyword costs 0.1 us
            frame = get(key)
            if frame is None or not frame.is_ready:
                done.append(False)
                continue
            size, slot = frame.blob_bytes, frame.slot
            view = target if type(target) is memoryview else memoryview(target)
            if view.nbytes != size:
                raise ValueError(
                    f"out must be {size} bytes for key {key.hex()[:12]}; got {view.nbytes}"
                )
            blob = buffer[slot.offset : slot.offset + size]
            try:
                view[:] = blob
            except (ValueError, NotImplementedError):
                # another item type than bytes, or several dimensions
                view = view.cast("B")
                view[:] = blob
            self._clock = frame.tick = self._clock + 1
            slot.size_class.policy.touch(frame)
            if never or not (always or self._is_sampled()):
                done.append(True)
                continue
            checked += 1
            # what was copied is checked, not what was there: it is in the cache, and it is what the caller gets
            same = words[slot.word + CHECKSUM_WORD] == digest(view)
            done.append(same or self._is_unchecked(frame))
        if checked:
            self.counts["verified"] += checked
        return done

    def _existing(self, frame: Frame) -> Reserve | None:
        """Say why *frame* stands in the way of a reservation; None if it is gone now."""
        if frame.is_writing:
            return Reserve.PENDING
        if frame.is_ready:
            # what was offered again must not be evicted for its neighbours
            self._clock = frame.tick = self._clock + 1
            frame.slot.size_class.policy.touch(frame)
            return Reserve.EXISTS
        if frame.leases:
            return Reserve.PENDING
        self._free(frame)
        return None
