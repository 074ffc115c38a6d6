"""Stand-ins for the parts of vLLM and of the store's workers that the connector's unit tests need."""

import hashlib

from kvferry.connector.geometry import Geometry
from kvferry.connector.scheduler import KVFerryManager
from kvferry.kvops.config import Config
from kvferry.kvops.namespace import namespace_digest
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.frames import Frames
from kvferry.kvops.store.store import Store

MIB = 1 << 20


def key(number, group=0):
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + group.to_bytes(4, "big")


def keys(count, group=0, start=0):
    return [key(start + number, group) for number in range(count)]


def geometry(groups=1, *, is_prefix=None, page_bytes=4096, blocks_per_chunk=1, world_size=1):
    return Geometry(
        group_ids=tuple(range(groups)),
        tokens_per_chunk=(32 * blocks_per_chunk,) * groups,
        page_bytes=(page_bytes,) * groups,
        is_prefix=is_prefix or (True,) * groups,
        has_mixed_pages=False,
        blocks_per_chunk=blocks_per_chunk,
        world_size=world_size,
        is_single_group=groups == 1,
    )


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Ranks:
    """The worker processes of an engine, as far as the arena sees them."""

    def __init__(self, arena, count):
        arena.attach()
        self.frames = [Frames(arena, rank) for rank in range(count)]

    def write(self, spec, *, failing=(), rank=None):
        """Fill the frames of one store job; *failing* rows get a failed part from the last rank."""
        for number, frames in enumerate(self.frames):
            if rank is not None and number != rank:
                continue
            last = number == len(self.frames) - 1
            for row, (header, _, generation) in enumerate(spec.refs.tolist()):
                if row in failing and last:
                    frames.fail_write(header, generation)
                elif frames.begin_write(header, generation) is not None:
                    frames.finish_write(header, generation)

    def read(self, spec, *, failing=()):
        for frames in self.frames:
            for row, (header, _, generation) in enumerate(spec.refs.tolist()):
                if header < 0:
                    continue
                there = frames.begin_read(header, generation)
                frames.finish_read(header, generation, ok=there is not None and row not in failing)


class Engine:
    """A manager on a real store in anonymous memory, with ranks that do what they are told."""

    def __init__(self, shape=None, *, arena=None, arena_bytes=16 * MIB, make_disk=None, **settings):
        shape = shape or geometry()
        self.geometry = shape
        self.clock = Clock()
        self.config = Config(arena_bytes=arena_bytes, **settings)
        self.arena = arena or Arena.open(None, arena_bytes, session="test")
        self.store = Store.open(self.arena, namespace=bytes(16), parts=shape.world_size)
        self.ranks = Ranks(self.arena, shape.world_size)
        self.epochs = 0
        self.disk = make_disk(self.store, self.clock) if make_disk else None
        self.was_unmapped = False
        self.manager = KVFerryManager(
            self.store, shape, self.config, self._next_namespace, self.disk,
            on_shutdown=self._unmapped, clock=self.clock,
        )  # fmt: skip

    def _unmapped(self):
        self.was_unmapped = True

    def _next_namespace(self):
        self.epochs += 1
        return namespace_digest({"epoch": self.epochs})

    def request(self, name="r"):
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        return context

    def stored(self, chunks, context=None):
        """Store *chunks* to the end; return the keys that were taken."""
        context = context or self.request()
        output = self.manager.prepare_store(chunks, context)
        self.ranks.write(output.store_spec)
        self.manager.complete_store(set(output.keys_to_store), context)
        return output.keys_to_store

    def end_step(self):
        self.manager.on_schedule_end(None)

    def counted(self, metric, *labels):
        return self.manager.tally.pending().get((metric.name, labels), 0)

    def leaks(self):
        stats = self.store.stats()
        return (
            stats["writing_frames"],
            stats["leases"],
            stats["orphaned_frames"],
            self.manager._inflight_bytes,
        )

    def close(self):
        self.manager.shutdown()
        self.arena.close()
