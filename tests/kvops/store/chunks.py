"""Keys and blobs of the tests. A blob follows from its key and size, so that whoever reads one can check it."""

import hashlib
import struct

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.frame import Frame
from kvferry.kvops.store.index import MAX_LOAD, Reader
from kvferry.kvops.store.spans import read_spans

KIB, MIB = 1 << 10, 1 << 20
ARENA_BYTES = 16 * MIB
NAMESPACE, OTHER = b"namespace-one-16", b"namespace-two-16"
POISON = 0xA5


def key(number, group=0, *, hash_bytes=32):
    """The chunk key of block *number* in KV cache group *group*."""
    digest = hashlib.shake_128(b"block %d" % number).digest(hash_bytes)
    return digest + struct.pack(">I", group)


def keys(count, first=0, group=0):
    return [key(number, group) for number in range(first, first + count)]


def blob(of, num_bytes):
    """The bytes stored under key *of*: no two keys or sizes look alike, nor does any page of a blob."""
    # a prime, so that a page in the place of another shows
    pattern = hashlib.shake_128(of + num_bytes.to_bytes(8, "little")).digest(min(num_bytes, 1021))
    return (pattern * (num_bytes // 1021 + 1))[:num_bytes]


def poisoned(num_bytes):
    return bytearray([POISON]) * num_bytes


def put(store, wanted, num_bytes):
    return store.put(wanted, [blob(k, num_bytes) for k in wanted])


def read(store, wanted, num_bytes):
    """Return the bytes of each key, or None where the store answers with a miss."""
    outs = [poisoned(num_bytes) for _ in wanted]
    return [
        bytes(out) if ok else None for out, ok in zip(outs, store.get(wanted, outs), strict=True)
    ]


def fill(frames, frame, rank=0):
    """Write one rank's part of a reserved frame, as a worker does; return what finish_write says."""
    place = frames.begin_write(frame.header, frame.generation)
    assert place is not None
    offset, num_bytes = place
    begin = rank * num_bytes
    frames_buffer(frames)[offset : offset + num_bytes] = blob(frame.key, frame.blob_bytes)[
        begin : begin + num_bytes
    ]
    return frames.finish_write(frame.header, frame.generation)


def frames_buffer(frames):
    return frames._buffer


def audit(store):
    """Check that records, free places, spans, headers, index and statistics of *store* tell one story."""
    arena, space, index = store.arena, store._space, store._index
    spans = [span for span in space.spans.all() if span.size is not None]
    everywhere = {header: (offset, span) for span in spans for header, offset in span.slots()}

    free, ready = [], []
    for size, size_class in space.classes.items():
        assert all(slot.span.size == size for slot in size_class.free)
        free += size_class.free
        ready += size_class.policy.frames()
    held, quarantine = list(space.held), list(store._quarantine)
    places = [*free, *(frame.slot for frame in ready + held), *quarantine]
    assert sorted(slot.header for slot in places) == sorted(everywhere), (
        "a place is lost or used twice"
    )
    assert all(everywhere[s.header] == (s.offset, s.span) for s in places)

    state = {header: arena.words[header // 8] & 0xFF for header in everywhere}
    assert all(state[slot.header] == fmt.State.FREE for slot in free)
    assert all(state[f.header] in (fmt.State.READY, fmt.State.BAD) for f in ready)
    assert all(state[f.header] == fmt.State.WRITING for f in held if f.is_writing)
    assert all(f.is_writing or f in store._orphans for f in held)
    assert set(store._orphans) <= set(held)

    listed = [f for frames in store._by_namespace.values() for f in frames.values()]
    assert set(listed) == {*ready, *held} - set(store._orphans)
    assert all(
        frames[f.key] is f for frames in store._by_namespace.values() for f in frames.values()
    )
    in_use = {f for f in [*listed, *store._orphans] if f.leases}
    assert {f for f in in_use if f.leases > store._pins.get(f, 0)} <= store._leased <= in_use

    assert index.used == len(ready)
    assert index.promised == sum(f.is_writing and f not in store._orphans for f in held)
    assert index.room == int(index.slots * MAX_LOAD) - index.used - index.deleted - index.promised
    entries = [arena.words[index.offset // 8 + at] for at in range(0, 2 * index.slots, 2)]
    assert sum(tag > 1 for tag in entries) == index.used
    assert entries.count(1) == index.deleted
    reader = Reader(arena)
    for frame in ready:
        expected = (frame.header, frame.offset, frame.generation)
        readable = state[frame.header] == fmt.State.READY
        assert reader.lookup(frame.namespace, [frame.key]) == [expected if readable else None]

    taken = 0
    for span in space.spans.all():
        assert span.first >= taken, "spans overlap"
        taken = span.first + span.slabs
        assert arena.data + taken * arena.slab_bytes <= arena.arena_bytes
        assert {space.spans.by_slab[slab] for slab in range(span.first, taken)} == {span}
    on_disk = read_spans(
        arena.buffer, arena.span_table, arena.slab_bytes, arena.slab_count, arena.data
    )
    assert [(s.first, s.slabs, s.size) for s in on_disk] == [
        (s.first, s.slabs, s.size) for s in space.spans.all()
    ]

    stats = store.stats()
    assert stats["ready_frames"] == len(ready)
    assert stats["free_frames"] == len(free)
    assert stats["writing_frames"] == sum(f.is_writing for f in held)
    assert stats["orphaned_frames"] == len(store._orphans)
    assert stats["quarantined_frames"] == len(quarantine)
    used = sum(f.slot.span.size.frame_bytes for f in [*ready, *held])
    assert stats["used_bytes"] == used <= arena.arena_bytes


def drain(store):
    """Take everything back that a test left in *store*: what was reserved, leased, orphaned, stored."""
    for frame in list(store._space.held):
        store.abort([frame])
    for frame in list(store._leased):
        for _ in range(frame.leases):
            store.release([frame])
    store.end_step()
    for namespace in list(store._by_namespace):
        store.new_epoch(namespace)
        store.delete(list(store.frames))
    assert store.reap() == 0
    audit(store)
    stats = store.stats()
    assert stats["used_bytes"] == stats["leases"] == stats["ready_frames"] == 0


def is_frame(answer):
    return isinstance(answer, Frame)
