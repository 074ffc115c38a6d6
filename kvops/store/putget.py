"""Put and get whole blobs in the owner's own process: reserve, copy and commit in one loop."""

import enum
import time
from collections.abc import Sequence

import xxhash

from . import format as fmt
from .checksum import Verify
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
        fmt.check_tokens(tokens)
        buffer, words, frames, plans = self._buffer, self._words, self.frames, self._plans
        index, namespace = self._index, self.namespace
        digest = xxhash.xxh3_64_intdigest
        algorithm = 0 if self._verify is Verify.OFF else 1
        now = int(time.time())
        out: list[bool | Reserve] = []
        # the steps of reserve, copy and commit in one loop: the calls between them would cost as much as they do
        for key, blob in zip(keys, blobs, strict=True):
            data = blob if type(blob) is bytes else memoryview(blob).cast("B")
            size = len(data)
            plan = plans.get(size) or self._plan(size)
            if not fmt.KEY_BYTES_MIN <= len(key) <= fmt.KEY_BYTES_MAX:
                fmt.check_key(key)
            there = frames.get(key)
            known = None if there is None else self._existing(there)
            if known is not None:
                out.append(known)
                continue
            if index.room <= 0:
                self._grow_index()
            slot = None
            if plan is not None and not (index.room <= 0 and index.is_full):
                free = plan[0].free
                slot = free.pop() if free else self._space.take(plan[0])
            if slot is None:
                self.counts["no_room"] += 1
                out.append(Reserve.NO_ROOM)
                continue
            self._generation = generation = self._generation + 1
            word, header, offset = slot.word, slot.header, slot.offset
            # free until the last step: a crash on the way leaves nothing behind
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
            self._tick = tick = self._tick + 1
            frame = Frame(key, namespace, slot, size, ready, tag, tick, True)
            words[word] = ready
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
        buffer, get = self._buffer, self.frames.get
        done = []
        for key, target in zip(keys, out, strict=True):
            frame = get(key)
            if frame is None or not frame.is_ready:
                done.append(False)
                continue
            size = frame.blob_bytes
            view = memoryview(target)
            if view.nbytes != size:
                raise ValueError(
                    f"out must be {size} bytes for key {key.hex()[:12]}; got {view.nbytes}"
                )
            if view.format != "B" or view.ndim != 1:
                view = view.cast("B")
            view[:] = buffer[frame.offset : frame.offset + size]
            self._tick += 1
            frame.tick = self._tick
            frame.slot.size_class.policy.touch(frame)
            done.append(self._verify is Verify.OFF or self._is_intact(frame, view))
        return done

    def _existing(self, frame: Frame) -> Reserve | None:
        """Say why *frame* stands in the way of a reservation; None if it is gone now."""
        if frame.is_writing:
            return Reserve.PENDING
        if frame.is_ready:
            # what was offered again must not be evicted for its neighbours
            self._tick += 1
            frame.tick = self._tick
            frame.slot.size_class.policy.touch(frame)
            return Reserve.EXISTS
        if frame.leases:
            return Reserve.PENDING
        self._free(frame)
        return None
