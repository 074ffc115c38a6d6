"""Put and get whole blobs in the owner's own process: reserve, copy and commit in one loop."""

import enum
import time
from collections.abc import Sequence

import xxhash

from . import format as fmt
from .checksum import CHECKSUM_WORD
from .frame import Frame, Slot
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
                range. Blobs before the one at fault are stored.
        """
        if self.parts != 1 or len(keys) != len(blobs):
            raise ValueError(
                f"put needs one part and a blob for each key; got {self.parts} parts, {len(keys)} keys, "
                f"{len(blobs)} blobs"
            )
        if tokens:
            fmt.check_tokens(tokens)
        buffer, words, frames, plans = self._buffer, self._words, self.frames, self._plans
        index, namespace = self._index, self.namespace
        digest = xxhash.xxh3_64_intdigest
        algorithm = self._algorithm
        now = int(time.time())
        out: list[bool | Reserve] = []
        # the steps of reserve, copy and commit in one loop: the calls between them would cost as much as they do
        for key, blob in zip(keys, blobs, strict=True):
            data = blob if isinstance(blob, bytes | memoryview) else memoryview(blob)
            size = data.nbytes if isinstance(data, memoryview) else len(data)
            plan = plans.get(size) or self._plan(size)
            if not _KEY_MIN <= len(key) <= _KEY_MAX:
                fmt.check_key(key)
            there = frames.get(key)
            if there is not None:
                known = self._existing(there)
                if known is not None:
                    out.append(known)
                    continue
            slot = None
            if plan is not None:
                free = plan[0].free
                slot = free.pop() if free and index.room > 0 else self._find_slot(plan[0])
            if slot is None:
                self.counts["no_room"] += 1
                out.append(Reserve.NO_ROOM)
                continue
            self._clock = generation = self._clock + 1
            header, offset = slot.header, slot.offset
            # free until the last step: a crash on the way leaves nothing behind
            try:
                buffer[offset : offset + size] = data
            except (ValueError, NotImplementedError):
                data = self._flatten(data, slot)
                buffer[offset : offset + size] = data
            body = pack_body(
                key, namespace, tokens, offset, size, now, _MAGIC, _VERSION, len(key), 1
            )
            pack_header(
                buffer, header + 8, body, xxh32(body), 0, 1, algorithm, 0, 0, size, digest(data) if algorithm else 0
            )  # fmt: skip
            ready = generation << 8 | 2
            tag = digest(namespace + key)
            if tag < 2:
                tag = 2
            frame = Frame(key, namespace, slot, size, ready, tag, generation, True)
            words[slot.word] = ready
            index.insert(tag, slot.place | generation & 0xFFFFFF)
            slot.size_class.policy.add(frame)
            frames[key] = frame
            out.append(True)
        self.counts["committed"] += out.count(True)
        return out

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
        digest, sampled = xxhash.xxh3_64_intdigest, self._is_sampling
        done = []
        checked = 0
        for key, target in zip(keys, out, strict=True):
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
            if sampled and not self._is_sampled():
                done.append(True)
                continue
            checked += 1
            # what was copied is checked, not what was there: it is in the cache, and it is what the caller gets
            same = words[slot.word + CHECKSUM_WORD] == digest(view)
            done.append(same or self._is_unchecked(frame))
        if checked:
            self.counts["verified"] += checked
        return done

    def _flatten(self, blob: Blob, slot: Slot) -> memoryview:
        """Return *blob* as plain bytes; if it is not contiguous, *slot* is free again and a TypeError is raised."""
        try:
            return memoryview(blob).cast("B")
        except TypeError:
            slot.size_class.free.append(slot)
            raise

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
