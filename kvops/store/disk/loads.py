"""Chunks on their way up: which may begin, and what is held for them."""

from collections.abc import Callable, Iterable, Sequence

from kvferry.kvops.store.file_io import Direction
from kvferry.kvops.store.frame import Frame
from kvferry.kvops.store.store import Reserve, Store

from .admission import Policy
from .files import BlobFiles
from .format import blob_tag
from .fresh import Fresh
from .health import Health
from .jobs import Handle, Move, Status
from .places import Tag

_RESERVED = {answer: Status[answer.name] for answer in Reserve}


class Loads:
    """Frames that are reserved for what is being read.

    Attributes:
        moving: by namespace and key. num_bytes: bytes of them.

    Threads: the store's one thread.
    """

    def __init__(
        self,
        store: Store,
        files: BlobFiles,
        health: Health,
        policy: Policy,
        fresh: Fresh,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._files = files
        self._health = health
        self._policy = policy
        self._fresh = fresh
        self._clock = clock
        self._half = store.arena.arena_bytes // 2
        self.moving: dict[tuple[bytes, bytes], Move] = {}
        self.num_bytes = 0

    def begin(
        self, handle: Handle, numbers: Iterable[int], tokens: int, asked_s: float
    ) -> list[Move]:
        """Reserve frames for some of a call's chunks; those that are not to be loaded are answered.

        Args:
            handle: of the call.
            numbers: which of its chunks.
            tokens: tokens of a chunk.
            asked_s: when it was asked for, monotonic.
        """
        frames, namespace, moving = self._store.frames, self._store.namespace, self.moving
        blob_bytes_of, parts = self._files.blob_bytes, self._store.parts
        # with more than this, one has to look closer
        room = (
            min(self._policy.max_inflight_bytes, self._half - self._fresh.num_bytes)
            - self.num_bytes
        )
        if self._health.is_off(Direction.READ):
            room = 0
        wanted: dict[int, list[tuple[int, bytes, Tag]]] = {}
        wanted_bytes = 0
        for at in numbers:
            key = handle.keys[at]
            frame = frames.get(key)
            if frame is not None and frame.is_ready:
                handle.answer(at, Status.EXISTS)
                continue
            if (namespace, key) in moving:
                handle.answer(at, Status.PENDING)
                continue
            tag = blob_tag(namespace, key)
            blob_bytes = blob_bytes_of(tag)
            if not blob_bytes or blob_bytes % parts or self._health.is_too_early(tag):
                handle.answer(at, Status.MISSING)
                continue
            if wanted_bytes + blob_bytes > room:
                refusal = self._refusal(blob_bytes, wanted_bytes)
                if refusal is not None:
                    handle.answer(at, refusal)
                    continue
            wanted_bytes += blob_bytes
            wanted.setdefault(blob_bytes, []).append((at, key, tag))
        moves: list[Move] = []
        for blob_bytes, some in wanted.items():
            moves += self._reserve(handle, some, blob_bytes, tokens, asked_s)
        return moves

    def _refusal(self, blob_bytes: int, wanted_bytes: int) -> Status | None:
        """Return why a chunk can't be loaded now, beside those of *wanted_bytes* that will be; None if it can."""
        bytes_after = self.num_bytes + wanted_bytes + blob_bytes
        if bytes_after > blob_bytes and bytes_after > self._policy.max_inflight_bytes:
            return Status.BUSY
        # half of the arena stays for those who compute; what came up is to be read before more of it
        if self._fresh.num_bytes + bytes_after > max(self._half, blob_bytes):
            self._fresh.forget_idle()
            is_moving = self.moving or wanted_bytes or self._fresh.is_moving
            return Status.BUSY if is_moving else Status.NO_ROOM
        return None if self._health.allows(Direction.READ) else Status.OFF

    def _reserve(
        self,
        handle: Handle,
        wanted: Sequence[tuple[int, bytes, Tag]],
        blob_bytes: int,
        tokens: int,
        asked_s: float,
    ) -> list[Move]:
        store, until_s = self._store, self._clock() + self._policy.timeout_s
        moves: list[Move] = []
        answers = store.reserve([key for _, key, _ in wanted], blob_bytes, tokens=tokens)
        for (at, key, tag), answer in zip(wanted, answers, strict=True):
            if not isinstance(answer, Frame):
                handle.answer(at, _RESERVED[answer])
                continue
            move = Move(Direction.READ, answer, tag, handle, at, asked_s, until_s)
            move.is_second = self._health.has_failed(tag)
            self.moving[store.namespace, key] = move
            moves.append(move)
        store.guard([move.frame for move in moves])
        self.num_bytes += blob_bytes * len(moves)
        return moves

    def end(self, moves: Sequence[Move]) -> None:
        """Let go of frames that the drive has let go of; commit or abort them next."""
        for move in moves:
            frame = move.frame
            self.num_bytes -= frame.blob_bytes
            del self.moving[frame.namespace, frame.key]
        self._store.unguard([move.frame for move in moves])
