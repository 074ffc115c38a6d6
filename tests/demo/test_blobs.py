import pytest

from kvferry.demo.blobs import flip_byte, ready_blobs, swap_blobs
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.format import make_key
from kvferry.kvops.store.store import Store

NAMESPACE = b"n" * 16
SIZE = 8192


@pytest.fixture
def path(tmp_path):
    return tmp_path / "arena"


@pytest.fixture
def opened(path, recwarn):
    arena = Arena.open(str(path), 16 << 20, session="test")
    store = Store.open(arena, namespace=NAMESPACE)
    yield store
    store.close()
    arena.close()


KEYS = [make_key(bytes([number]) * 32, number % 2) for number in range(4)]


def contents(store):
    out = [bytearray(SIZE) for _ in KEYS]
    found = store.get(KEYS, out)
    return [bytes(blob) if hit else None for blob, hit in zip(out, found, strict=True)]


def put(store):
    blobs = [bytes([number + 1]) * SIZE for number in range(len(KEYS))]
    store.put(KEYS, blobs)
    return blobs


def test_lists_what_is_ready(opened, path):
    assert ready_blobs(path) == []
    put(opened)
    found = ready_blobs(path)
    assert {blob.key for blob in found} == set(KEYS)
    assert {blob.group for blob in found} == {0, 1}
    assert {(blob.namespace, blob.size) for blob in found} == {(NAMESPACE, SIZE)}


def test_a_flipped_byte_is_noticed(opened, path):
    blobs = put(opened)
    victim = next(blob for blob in ready_blobs(path) if blob.key == KEYS[1])
    flip_byte(path, victim, SIZE - 1)
    assert contents(opened) == [blobs[0], None, blobs[2], blobs[3]]


def test_swapped_blobs_are_valid_and_wrong(opened, path):
    blobs = put(opened)
    found = {blob.key: blob for blob in ready_blobs(path)}
    swap_blobs(path, found[KEYS[0]], found[KEYS[2]])
    assert contents(opened) == [blobs[2], blobs[1], blobs[0], blobs[3]]
    swap_blobs(path, found[KEYS[0]], found[KEYS[2]])
    assert contents(opened) == blobs


def test_refuses_what_is_not_an_arena(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(bytes(8192))
    with pytest.raises(ValueError, match="must be a kvferry arena"):
        ready_blobs(path)
