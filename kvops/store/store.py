"""The store's owner: which chunk is where, who may read it, what goes next.

One process owns an arena: it alone writes the index and gives frames out. Workers fill and read the frames that they
were told of (frames.py). All verbs take lists and answer per item, in request order.

    reserve          parts filled            commit
    ------> WRITING -------------- WRITING ---------> READY ---- lease/release ----> READY
               |  abort                                 |  evict, delete      a worker found it corrupt
               v                                        v                              v
              FREE <---------------------------------- FREE <------ last lease ------ BAD
"""

import enum
import time
from collections.abc import Iterable, Sequence

from . import format as fmt
from .arena import Arena
from .checksum import Verify
from .frame import Frame
from .policy import POLICIES
from .putget import PutGet
from .putget import Reserve as Reserve
from .recovery import parts_ready

_ONE_STATE = fmt.State.READY - fmt.State.WRITING

LIFT_EVERY_STEPS = 256
"""Steps between two looks for workers of an earlier engine, where frames wait for their end; a look is 0.1 ms."""


class Lookup(enum.Enum):
    """Whether a chunk can be read."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


_HIT, _PENDING, _MISS = Lookup.HIT, Lookup.PENDING, Lookup.MISS


class Store(PutGet):
    """The chunks of one arena, seen by its owner. Made by :meth:`open`.

    Attributes:
        frames: key -> record of every frame of the current namespace, being written or ready. For lookups on a hot
            path: ``frame.is_ready``, after :meth:`notice_bad`.
        step: number of the scheduler step; ``frame.step = store.step`` keeps a frame until :meth:`end_step`.
        counts: what happened since the store was opened.

    Threads: one. Ownership: the arena is the caller's; :meth:`close` leaves it mapped.
    """

    @classmethod
    def open(
        cls,
        arena: Arena,
        *,
        namespace: bytes,
        parts: int = 1,
        verify: str = "always",
        eviction: str = "lru",
    ) -> "Store":
        """Become the owner of *arena* and take in what rests there.

        Args:
            arena: mapped, not owned by another process.
            namespace: 16 bytes; only chunks of this namespace can be hit.
            parts: ranks that fill a chunk together.
            verify: "always", "sampled" (1 of 16) or "off": when :meth:`get` checks a blob; "off" makes no checksums.
            eviction: "lru".

        Raises:
            ArenaBusyError: another live process owns it.
            ValueError: an argument is not one of the above.
        """
        fmt.check_namespace(namespace)
        if not 0 < parts <= fmt.MAX_PARTS:
            raise ValueError(f"parts must be 1 to {fmt.MAX_PARTS}; got {parts}")
        if eviction not in POLICIES:
            raise ValueError(f"eviction must be one of {sorted(POLICIES)}; got {eviction!r}")
        return cls(arena, namespace, parts, Verify(verify), eviction)

    # --- looking -----------------------------------------------------------------------------------------------

    def lookup(self, keys: Iterable[bytes]) -> list[Lookup]:
        """Return for each key whether its chunk can be read now, is being written, or is not there."""
        frames, leased = self.frames, self._leased
        if leased:
            self.notice_bad()
        if not self._space.held and (not leased or all(frame.is_ready for frame in leased)):
            # every frame that has a key is ready: no need to touch it
            return [_HIT if key in frames else _MISS for key in keys]
        get = frames.get
        return [
            _MISS if (f := get(key)) is None
            else _HIT if f.is_ready
            else _PENDING if f.is_writing
            else _MISS
            for key in keys
        ]  # fmt: skip

    def notice_bad(self) -> None:
        """Look at what workers say of the frames that were lent to them; one that is corrupt is ready no more.

        For those who read *frames* themselves: once before the lookups of a step.
        """
        words = self._words
        seen = sum([words[word] for word in self._bad_words])
        if seen != self._bad_seen:
            self._bad_seen = seen
            for frame in self._leased:
                frame.is_ready = frame.is_ready and words[frame.word] == frame.ready

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that chunks were used. Pass the keys of a prompt last first: a prefix must outlive its tail."""
        get = self.frames.get
        for key in keys:
            frame = get(key)
            if frame is not None and not frame.is_writing:
                self._clock = frame.tick = self._clock + 1
                frame.slot.size_class.policy.touch(frame)

    def end_step(self) -> None:
        """Drop all provisional leases."""
        self.step += 1
        self._space.changes += 1
        if self._quarantine and self.step % LIFT_EVERY_STEPS == 0:
            self._lift_quarantine()

    # --- writing -----------------------------------------------------------------------------------------------

    def reserve(
        self, keys: Sequence[bytes], blob_bytes: int, *, tokens: int = 0
    ) -> list[Frame | Reserve]:
        """Reserve a frame for each key that is not there yet.

        Args:
            keys: chunk keys (block hash of 16 to 32 bytes, then 4 bytes of group id).
            blob_bytes: bytes of a chunk, all parts together; part r is bytes [r, r + 1) * blob_bytes / parts.
            tokens: tokens of a chunk, for the header; below 2**32.

        Returns:
            For each key a frame that is WRITING and the caller's until :meth:`commit` or :meth:`abort`, or why not.

        Raises:
            ValueError: a key, *blob_bytes* or *tokens* is not as above; nothing was reserved.
        """
        plan = self._plan(blob_bytes)
        for key in keys:
            fmt.check_key(key)
        fmt.check_tokens(tokens)
        if plan is None:
            self.counts["no_room"] += len(keys)
            return [Reserve.NO_ROOM] * len(keys)
        size_class, empty = plan
        now = int(time.time())
        out: list[Frame | Reserve] = []
        frames, held = self.frames, self._space.held
        for key in keys:
            there = frames.get(key)
            if there is not None:
                known = self._existing(there)
                if known is not None:
                    out.append(known)
                    continue
            frame = self._claim(key, size_class, blob_bytes)
            if frame is None:
                out.append(Reserve.NO_ROOM)
                continue
            self._write_header(frame, tokens, now, empty)
            held.add(frame)
            out.append(frame)
        return out

    def commit(self, frames: Iterable[Frame]) -> list[bool]:
        """Make frames readable whose parts are all ready, and abort the others; return which became readable."""
        out = []
        words, known, buffer, parts = self._words, self.frames, self._buffer, self.parts
        held, index, publish = self._space.held, self._index, self._publish
        for frame in frames:
            mine = (
                frame.is_writing
                # the state before READY
                and words[frame.word] == frame.ready - _ONE_STATE
                and known.get(frame.key) is frame
                and parts_ready(buffer, frame.slot.header, parts)
            )
            if mine:
                held.discard(frame)
                index.promised -= 1
                index.room += 1
                publish(frame)
            else:
                self.abort((frame,))
            out.append(mine)
        self.counts["committed"] += out.count(True)
        return out

    def abort(self, frames: Iterable[Frame]) -> None:
        """Give reserved frames back unread. No worker may write them any more. Other frames are left alone."""
        for frame in frames:
            if not frame.is_writing:
                continue
            self.counts["aborted"] += 1
            if frame in self._orphans:
                self._free_orphan(frame)
            else:
                self._free(frame)

    # --- reading -----------------------------------------------------------------------------------------------

    def lease(self, frames: Iterable[Frame]) -> None:
        """Keep frames from being evicted while a load reads them. Counted.

        Raises:
            ValueError: a frame is neither ready nor ready until a worker found it corrupt; none was leased.
        """
        if self._words[fmt.ATTACH_SEQUENCE_WORD] != self._attach_seen:
            # whoever is lent a frame must be listened to
            self._attach_seen = self._words[fmt.ATTACH_SEQUENCE_WORD]
            self._bad_words = self.arena.bad_words()
            # what was counted before we listened: look at every frame once
            self._bad_seen = -1
        frames = list(frames)
        for frame in frames:
            # READY and BAD differ in the lowest bit
            if self._words[frame.word] | 1 != frame.ready | 1:
                raise ValueError(
                    f"frames must be ready; got {frame!r}, which is not there any more"
                )
        for frame in frames:
            frame.leases += 1
            frame.reads += 1
            self._leased.add(frame)

    def release(self, frames: Iterable[Frame]) -> None:
        """End loads. A frame that a worker found corrupt is freed when nobody reads it any more."""
        for frame in frames:
            if frame.leases == 0:
                raise ValueError(f"frames must be leased; got {frame!r}, which nobody reads")
            frame.leases -= 1
            # not among them: it was taken back after a reset
            if frame.leases or frame not in self._leased:
                continue
            self._leased.discard(frame)
            self._space.changes += 1
            if frame in self._orphans:
                self._free_orphan(frame)
            elif self._words[frame.word] != frame.ready:
                self._free(frame)
                self.counts["bad"] += 1

    def pin(self, frames: Iterable[Frame]) -> None:
        """Keep ready frames where they are while this process itself reads them. Counted, as leases are.

        Raises:
            ValueError: a frame is not ready; those before it are pinned.
        """
        for frame in frames:
            if not frame.is_ready:
                raise ValueError(f"frames must be ready; got {frame!r}, which is not")
            frame.leases += 1
            self._pins[frame] = self._pins.get(frame, 0) + 1

    def unpin(self, frames: Iterable[Frame]) -> None:
        """End what :meth:`pin` began; what was found corrupt, or was reset, meanwhile is freed."""
        for frame in frames:
            if self._pins[frame] == 1:
                del self._pins[frame]
            else:
                self._pins[frame] -= 1
            frame.leases -= 1
            if frame.leases:
                continue
            self._leased.discard(frame)
            self._space.changes += 1
            if frame in self._orphans:
                self._free_orphan(frame)
            elif self._words[frame.word] != frame.ready:
                self._free(frame)
                self.counts["bad"] += 1

    def guard(self, frames: Iterable[Frame]) -> None:
        """Keep reserved frames from being taken back after a reset while this process itself fills them."""
        self._pins.update(dict.fromkeys(frames, 1))

    def unguard(self, frames: Iterable[Frame]) -> None:
        """End what :meth:`guard` began; commit or abort the frames next."""
        for frame in frames:
            del self._pins[frame]

    def delete(self, keys: Iterable[bytes]) -> list[bool]:
        """Delete chunks that are ready and that no load reads; return which."""
        out = []
        for key in keys:
            frame = self.frames.get(key)
            gone = frame is not None and not frame.is_writing and not self._is_held(frame)
            if gone and frame is not None:
                self._free(frame)
                self.counts["deleted"] += 1
            out.append(gone)
        return out

    # --- life --------------------------------------------------------------------------------------------------

    def new_epoch(self, namespace: bytes) -> None:
        """Make everything of the current namespace unreachable and go on under *namespace*.

        Frames at rest are freed at once; those in the hands of workers by :meth:`reap`, when the workers are done.
        """
        fmt.check_namespace(namespace)
        old = self._by_namespace.pop(self.namespace)
        self.counts["resets"] += 1
        for frame in list(old.values()):
            if frame.is_writing or frame.leases:
                self._unlist(frame, old)
                self._space.held.add(frame)
                self._orphans[frame] = None
            else:
                self._free(frame, old)
        self.namespace = namespace
        self.frames = self._by_namespace.setdefault(namespace, {})

    def reap(self) -> int:
        """Free what workers, live or dead, have let go of since a reset or a crash; return what is still waited for."""
        if self._orphans:
            gone = [f for f in self._orphans if self._is_done(f)]
            for frame in gone:
                self._free_orphan(frame)
        if self._quarantine:
            self._lift_quarantine()
        return len(self._orphans)

    def orphaned_bytes(self) -> int:
        """Return the bytes of frames that workers were writing when their namespace was reset, and still may be."""
        return sum(frame.blob_bytes for frame in self._orphans if frame.is_writing)

    def abandon(self) -> int:
        """Free what :meth:`reap` waits for, because no worker is alive to touch it; return how many frames."""
        gone = [frame for frame in self._orphans if frame not in self._pins]
        for frame in gone:
            self._free_orphan(frame)
        return len(gone)

    def coldest(self, count: int) -> list[Frame]:
        """Return up to *count* frames of this namespace for each size, those to be given up first at the front."""
        return [
            frame
            for size_class in self._space.classes.values()
            for frame in size_class.policy.coldest(count)
            if frame.namespace == self.namespace
        ]

    def free_share(self) -> float:
        """Return the share of the arena's memory for frames that holds none, 0 to 1."""
        whole: int = self.arena.slab_count * self.arena.slab_bytes
        return self._space.free_bytes() / whole

    def take_evicted(self) -> list[bytes]:
        """Return the keys evicted since the last call, oldest first, the latest 65,536 at most."""
        keys = list(self._evicted)
        self._evicted.clear()
        return keys

    def stats(self) -> dict[str, int]:
        """Return sizes in bytes, counts of frames by state, and what happened since opening (see *counts*)."""
        classes = self._space.classes.values()
        ready = sum(len(c.policy) for c in classes)
        used = sum(len(c.policy) * c.size.frame_bytes for c in classes)
        held = self._space.held
        return {
            "arena_bytes": self.arena.arena_bytes,
            "used_bytes": used + sum(f.slot.size_class.size.frame_bytes for f in held),
            "ready_frames": ready,
            "writing_frames": sum(f.is_writing for f in held),
            "orphaned_frames": len(self._orphans),
            "quarantined_frames": len(self._quarantine),
            "free_frames": sum(len(c.free) for c in classes),
            "leases": sum(f.leases for f in self.frames.values())
            + sum(f.leases for f in self._orphans),
            **self.counts,
        }

    def close(self) -> None:
        """Give up ownership. Frames stay; reserved ones are free for the next owner."""
        self.arena.release_ownership()
