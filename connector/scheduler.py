"""The scheduler's half: which chunks are in the store, which go in, which come out. Scheduler process; no CUDA here.

vLLM's hooks, in call order: on_new_request, lookup*, prepare_load, on_schedule_end, prepare_store, on_request_finished
(all inside one step; 0.33 calls on_schedule_end last), then complete_store and complete_load as jobs end.

Rules that vLLM's contract leaves open, and the answers:

1. A lookup sends no message, makes no system call and builds nothing. A hit is held until the step ends.
2. A store is never refused with None, which vLLM would ask again every step: what doesn't fit is left out, and with it
   the rest of that request, since a chunk behind a gap can't be found.
3. Jobs always end well for vLLM. What was stored is what the workers marked in the frames' headers.
4. A frame that goes away between lookup and load is a failed load, not an exception.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

from kvferry.kvops.config import Config
from kvferry.kvops.metrics import Metrics
from kvferry.kvops.store.frame import Frame
from kvferry.kvops.store.store import Reserve, Store

from . import compat
from .disk import Disk
from .geometry import Geometry
from .messages import GONE, FrameLoadStoreSpec
from .orphans import Orphans
from .request_state import RequestState
from .stats import Labels, Tally, store_gauges

logger = logging.getLogger("vllm.kvferry")

_GAUGES_EVERY_S = 5.0
"""Time between two reports of gauges, seconds: counting frames costs more than a step should pay."""
_WRITER_CHECK_EVERY_S = 0.25
"""Time between two looks at whether a pending chunk still has somebody to write it, seconds: a look reads /proc."""


class KVFerryManager(OffloadingManager):
    """One engine's view of the store.

    Args:
        store: the store, owned by this process.
        geometry: the KV cache groups.
        config: settings.
        new_namespace: makes the namespace of the next cache epoch.
        disk: the disk below the store, if there is one.
        on_shutdown: called once, after the store has been closed.

    Threads: the scheduler's one thread.
    Ownership: owns *store* and *disk*.
    """

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        config: Config,
        new_namespace: Callable[[], bytes],
        disk: Disk | None = None,
        on_shutdown: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._words = store.arena.words
        self._geometry = geometry
        self._config = config
        self._new_namespace = new_namespace
        self._disk = disk
        self._on_shutdown = on_shutdown
        self._clock = clock
        self._slot_of = {group_id: at for at, group_id in enumerate(geometry.group_ids)}
        self._blob_bytes = [geometry.world_size * size for size in geometry.part_bytes]
        self._epoch = 0
        self._inflight_bytes = 0
        self._orphans = Orphans(store, clock)
        self._hits = self._misses = self._pending = 0
        self._next_stats_s = 0.0
        self._next_writer_check_s = 0.0
        self._writers = 0
        self.tally = Tally()
        self._host_source, self._disk_source = compat.hit_sources()

    def adopt_part_bytes(self, part_bytes: Sequence[int]) -> None:
        """Take the sizes that the workers found, where the engine's table alone doesn't tell them."""
        self._blob_bytes = [self._geometry.world_size * size for size in part_bytes]

    # --- lookup ------------------------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Say whether one chunk is stored. A hit stays valid until the end of the step."""
        frame = self._store.frames.get(key)
        if frame is not None and self._words[frame.word] == frame.ready:
            frame.step = self._store.step
            self._hits += 1
            return LookupResult.HIT
        if frame is None and self._disk is None:
            self._misses += 1
            return LookupResult.MISS
        return self._lookup_unready(key, frame, req_context)

    def _lookup_unready(self, key: bytes, frame: Frame | None, req_context: Any) -> LookupResult:
        """Answer for a chunk that can't be read now: one that is being written, or one on the disk."""
        disk, now = self._disk, self._clock()
        is_on_disk = disk is not None and (frame is None or disk.is_loading(key)) and disk.has(key)
        if is_on_disk or (frame is not None and frame.is_writing and self._has_writer(now)):
            answer = LookupResult.HIT_PENDING
        else:
            answer = LookupResult.MISS
        if answer is not LookupResult.MISS and not self._may_wait(req_context, now):
            answer = LookupResult.MISS
        if disk is not None and is_on_disk and answer is not LookupResult.MISS:
            # vLLM goes on to the chunks behind, so that all of a prefix are read at once
            answer = disk.fetch(key, self._size_of(key)[1])
        if answer is LookupResult.MISS:
            self._misses += 1
        elif answer is LookupResult.HIT:
            self._hits += 1
        else:
            self._pending += 1
        return answer

    def _may_wait(self, req_context: Any, now: float) -> bool:
        state, timeout_ms = self._state(req_context), self._config.pending_timeout_ms
        if not timeout_ms or state.may_wait(now, timeout_ms / 1000):
            return timeout_ms > 0
        if not state.gave_up:
            state.gave_up = True
            self.tally.count(Metrics.PENDING_TIMEOUTS)
        return False

    def _has_writer(self, now: float) -> bool:
        """Return whether a worker of this engine lives, asked at most every quarter of a second."""
        if now >= self._next_writer_check_s:
            self._next_writer_check_s = now + _WRITER_CHECK_EVERY_S
            self._writers = self._store.arena.workers_alive()
        return self._writers > 0

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """Say where a hit comes from: memory of this host, or its disk."""
        is_from_disk = key in self._state(req_context).from_disk
        return self._disk_source if is_from_disk else self._host_source

    # --- load --------------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> FrameLoadStoreSpec:
        """Hold the frames of *keys* until complete_load, and tell the worker where they are."""
        state = self._state(req_context)
        state.stop_waiting()
        rows: list[tuple[int, int, int]] = []
        counts = [0] * len(self._slot_of)
        held = []
        for key in keys:
            counts[self._slot(key)] += 1
            frame = self._store.frames.get(key)
            if frame is None or self._words[frame.word] != frame.ready:
                state.loads[key] = None
                rows.append(GONE)
                continue
            state.loads[key] = frame
            held.append(frame)
            rows.append((frame.header, frame.offset, frame.generation))
        self._store.lease(held)
        if self._disk is not None:
            state.from_disk = self._disk.used(held)
        self._remember(state, keys)
        return FrameLoadStoreSpec.from_rows(rows, counts)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Let go of the frames of a load, whether it worked or not."""
        loads = self._state(req_context).loads
        frames = [frame for key in keys if (frame := loads.pop(key, None)) is not None]
        self._store.release(frames)

    # --- store -------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        """Reserve frames for those of *keys* that are new, as far as they fit."""
        state = self._state(req_context)
        if state.skip:
            self.tally.count(Metrics.SKIPPED_STORES, len(keys), "sticky")
            return self._nothing()
        new = [key for key in keys if key not in self._store.frames]
        fitting = self._fit(new, state, req_context)
        frames = self._reserve(fitting, state)
        if not frames:
            return self._nothing()
        rows: list[tuple[int, int, int]] = []
        counts = [0] * len(self._slot_of)
        chosen = []
        # vLLM walks its groups and chunks in the order of *keys*
        for key in new:
            frame = frames.get(key)
            if frame is not None:
                rows.append((frame.header, frame.offset, frame.generation))
                counts[self._slot(key)] += 1
                chosen.append(key)
        self._remember(state, chosen)
        return PrepareStoreOutput(
            keys_to_store=chosen,
            store_spec=FrameLoadStoreSpec.from_rows(rows, counts),
            evicted_keys=[],
        )

    def _fit(self, keys: list[bytes], state: RequestState, req_context: Any) -> list[bytes]:
        """Return the leading chunks of *keys*, by position in the request, for which there is budget in flight."""
        if len(self._slot_of) > 1:
            keys = sorted(keys, key=self._positions(keys, req_context).__getitem__)
        room = self._config.max_inflight_bytes - self._inflight_bytes - self._orphans.num_bytes
        for at, key in enumerate(keys):
            room -= self._blob_bytes[self._slot(key)]
            if room < 0:
                state.skip = "inflight"
                self.tally.count(Metrics.SKIPPED_STORES, len(keys) - at, "inflight")
                return keys[:at]
        return keys

    def _reserve(self, keys: list[bytes], state: RequestState) -> dict[bytes, Frame]:
        """Reserve frames for *keys* up to the first for which there is no room."""
        frames: dict[bytes, Frame] = {}
        behind_gap: list[Frame] = []
        refused = 0
        for (blob_bytes, tokens), run in itertools.groupby(keys, self._size_of):
            same_size = list(run)
            if refused:
                refused += len(same_size)
                continue
            answers = self._store.reserve(same_size, blob_bytes, tokens=tokens)
            for key, answer in zip(same_size, answers, strict=True):
                if isinstance(answer, Frame):
                    if refused:
                        behind_gap.append(answer)
                    else:
                        frames[key] = answer
                elif answer is Reserve.NO_ROOM:
                    refused += 1
        if refused:
            state.skip = "no_room"
            self._store.abort(behind_gap)
            self.tally.count(Metrics.SKIPPED_STORES, refused, "no_room")
            self.tally.count(Metrics.SKIPPED_STORES, len(behind_gap), "sticky")
        self._inflight_bytes += sum(frame.blob_bytes for frame in frames.values())
        state.stores.update(frames)
        return frames

    def complete_store(
        self, keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        """Publish the chunks of one job that every rank has written; give up the others.

        *keys* comes as a set: the order is that of reservation. Behind the first chunk that is given up, no further
        chunk of the request is published where chunks hang together.
        """
        state = self._state(req_context)
        frames = [frame for key, frame in state.stores.items() if key in keys]
        # groups in which chunks stand alone (sliding windows) come after those that can make them useless
        frames.sort(key=lambda frame: not self._geometry.is_prefix[self._slot(frame.key)])
        published: list[Frame] = []
        given_up: list[Frame] = []
        for frame in frames:
            del state.stores[frame.key]
            self._inflight_bytes -= frame.blob_bytes
            if state.skip == "aborted" or not success:
                given_up.append(frame)
            elif self._store.commit([frame])[0]:
                published.append(frame)
            else:
                # the store has already taken the frame back
                self.tally.count(Metrics.ABORTED_STORES)
                if self._geometry.is_prefix[self._slot(frame.key)]:
                    state.skip = "aborted"
        self._store.abort(given_up)
        self.tally.count(Metrics.ABORTED_STORES, len(given_up))
        self.tally.count(Metrics.STORED_CHUNKS, len(published))
        if self._disk is not None:
            self._disk.stored(published)

    # --- life of requests and steps ----------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Note a request; by default new chunks are stored as they come."""
        req_context.set_state(RequestState(self._epoch))
        return RequestOffloadingContext()

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Note that the chunks were used (vLLM 0.30; newer ones tell by position, at the end of a request)."""
        self._store.touch(list(keys)[::-1])

    def on_request_finished(self, req_context: Any) -> None:
        """Make the chunks of the request the most recently used, the prefix last so that it outlives its tail."""
        positions = compat.key_positions(req_context)
        if positions is None:
            state = self._state(req_context)
            self._store.touch(list(state.keys)[::-1])
        else:
            self._store.touch(sorted(positions, key=positions.__getitem__, reverse=True))

    def on_schedule_end(self, context: Any) -> None:
        """Let go of hits that no load has claimed, and take back frames whose jobs a reset made stale."""
        self._store.end_step()
        if self._disk is not None:
            self._disk.poll()
        self._orphans.reap()

    def has_pending_work(self) -> bool:
        """Return whether the engine must go on stepping until the workers are done with stale jobs."""
        return self._orphans.are_waited_for

    def reset_cache(self) -> None:
        """Move to a new epoch: the weights may have changed, so nothing stored so far may ever be found again."""
        self._epoch += 1
        self._store.new_epoch(self._new_namespace())
        self._inflight_bytes = 0
        self._orphans.expect()
        self.tally.count(Metrics.RESETS)

    def get_stats(self) -> Any:
        """Return what was counted since the last call, or None."""
        self.tally.count(Metrics.LOOKUP_CHUNKS, self._hits, "hit")
        self.tally.count(Metrics.LOOKUP_CHUNKS, self._misses, "miss")
        self.tally.count(Metrics.LOOKUP_CHUNKS, self._pending, "pending")
        self._hits = self._misses = self._pending = 0
        self.tally.follow(Metrics.EVICTED_CHUNKS, self._store.counts["evicted"])
        self.tally.follow(Metrics.BAD_FRAMES, self._store.counts["bad"])
        if self._disk is not None:
            self._disk.count(self.tally)
        now = self._clock()
        gauges: Iterable[tuple[Any, Labels, float]] = ()
        if now >= self._next_stats_s:
            self._next_stats_s = now + _GAUGES_EVERY_S
            gauges = [
                *store_gauges(self._store.stats(), self._inflight_bytes + self._orphans.num_bytes),
                *(self._disk.gauges() if self._disk else ()),
            ]
        return self.tally.report(gauges)

    def shutdown(self) -> None:
        """Give the store up: what was published stays in an arena that has a path."""
        if self._disk is None or self._disk.close():
            self._store.close()
            self._on_shutdown()
        else:
            # a drive may still write there: nobody else may have the arena, and it must stay mapped
            logger.error("the arena stays with this process: the disk has not answered")

    def give_way(self) -> None:
        """Let the disk go on, in a step that computes nothing."""
        if self._disk is not None:
            self._disk.give_way()

    # --- small things ------------------------------------------------------------------------------------------

    def _state(self, req_context: Any) -> RequestState:
        state: RequestState | None = req_context.get_state(RequestState)
        if state is None:
            state = RequestState(self._epoch)
            req_context.set_state(state)
        elif state.epoch != self._epoch:
            state.start_over(self._epoch)
        return state

    def _slot(self, key: bytes) -> int:
        """Return the place of a key's group among the offloaded groups."""
        return self._slot_of[int.from_bytes(key[-4:], "big")]

    def _size_of(self, key: bytes) -> tuple[int, int]:
        """Return bytes and tokens of a chunk."""
        slot = self._slot(key)
        return self._blob_bytes[slot], self._geometry.tokens_per_chunk[slot]

    def _positions(self, keys: Iterable[bytes], req_context: Any) -> Mapping[bytes, int]:
        """Return where each chunk ends in the request, in tokens; counted from the first key before vLLM 0.31."""
        known = compat.key_positions(req_context) or {}
        seen = [0] * len(self._slot_of)
        positions = {}
        for key in keys:
            slot = self._slot(key)
            seen[slot] += self._geometry.tokens_per_chunk[slot]
            positions[key] = known.get(key, seen[slot])
        return positions

    @staticmethod
    def _remember(state: RequestState, keys: Iterable[bytes]) -> None:
        state.keys.update(dict.fromkeys(keys))

    def _nothing(self) -> PrepareStoreOutput:
        spec = FrameLoadStoreSpec.from_rows((), [0] * len(self._slot_of))
        return PrepareStoreOutput(keys_to_store=[], store_spec=spec, evicted_keys=[])
