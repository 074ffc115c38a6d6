"""What a client can rely on, whichever daemon answers: the same tests on every kind of daemons.KINDS."""

import os
import subprocess
import sys
import threading
import time

import pytest

from kvferry.kvops.errors import (
    VineyardConnectionError,
    VineyardStatusError,
    VineyardTimeoutError,
)
from kvferry.kvops.vineyard.client import Client
from kvferry.kvops.vineyard.ids import BLOB_BIT, EMPTY_BLOB, INVALID_ID, format_id
from kvferry.kvops.vineyard.status import Status

from .daemons import MEMORY_BYTES

KIB, MIB = 1 << 10, 1 << 20
NOBODY = 12345
NOBLOB = BLOB_BIT | 12345


def put(client, data):
    blob = client.create_blob(len(data))
    blob.view[:] = data
    client.seal([blob.object_id])
    return blob.object_id


def make_object(client, typename="kvferry::Test", **members):
    return client.objects.create({"typename": typename, **members})


def member(client, object_id):
    return client.objects.get(object_id)


def refused(code):
    return pytest.raises(VineyardStatusError, match=f"code {int(code)}:")


# blobs


def test_a_blob_is_read_by_another_client_without_a_copy(client, other):
    blob = client.create_blob(5)
    assert blob.object_id & BLOB_BIT
    blob.view[:] = b"hello"
    client.seal([blob.object_id])
    found = other.get_blob(blob.object_id)
    assert bytes(found.view) == b"hello"
    assert found.view.readonly
    assert found.payload.is_sealed
    blob.view[:1] = b"j"
    assert bytes(found.view) == b"jello"


def test_writable_views_are_given_on_request(client, other):
    object_id = put(client, b"abc")
    other.get_blob(object_id, writable=True).view[:] = b"xyz"
    assert bytes(client.get_blob(object_id).view) == b"xyz"


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_many_blobs_at_once_keep_their_order(client, other, count):
    blobs = client.create_blobs([100 + index for index in range(count)])
    for index, blob in enumerate(blobs):
        blob.view[:] = bytes([index % 251]) * (100 + index)
    ids = [blob.object_id for blob in blobs]
    client.seal(ids)
    found = other.get_blobs(ids[::-1])
    assert [blob.object_id for blob in found] == ids[::-1]
    for index, blob in enumerate(found[::-1]):
        assert bytes(blob.view) == bytes([index % 251]) * (100 + index)


def test_many_blobs_in_one_request_keep_their_order(client):
    blobs = client.create_blobs([7, 0, 300], one_request=True)
    assert [len(blob.view) for blob in blobs] == [7, 0, 300]
    assert blobs[1].object_id == EMPTY_BLOB
    client.seal([blob.object_id for blob in blobs])


def test_nothing_asked_is_nothing_sent(client):
    trips = client.round_trips
    assert client.create_blobs([]) == client.get_blobs([]) == []
    assert client.create_blobs([], one_request=True) == []
    client.seal([])
    client.release([])
    assert client.round_trips == trips


def test_batches_take_one_round_trip(client):
    trips = client.round_trips
    ids = [blob.object_id for blob in client.create_blobs([64] * 100)]
    client.seal(ids)
    client.get_blobs(ids)
    client.release(ids)
    client.drop_blobs(ids)
    assert client.round_trips == trips + 5


def test_the_empty_blob_is_always_there(client):
    blob = client.create_blob(0)
    assert blob.object_id == EMPTY_BLOB
    client.seal([EMPTY_BLOB])
    assert bytes(client.get_blob(EMPTY_BLOB).view) == b""
    client.drop_blobs([EMPTY_BLOB])
    assert client.get_blob(EMPTY_BLOB) is not None


def test_missing_blobs_are_none_in_their_place(client):
    first, last = put(client, b"first"), put(client, b"last")
    found = client.get_blobs([NOBLOB, last, NOBODY, first, last])
    assert [blob and bytes(blob.view) for blob in found] == [None, b"last", None, b"first", b"last"]


def test_unsealed_blobs_are_refused_unless_asked_for(client, other):
    sealed, unsealed = put(client, b"done"), client.create_blob(4)
    with refused(Status.OBJECT_NOT_SEALED):
        other.get_blobs([sealed, unsealed.object_id])
    found = other.get_blobs([sealed, unsealed.object_id], unsafe=True)
    assert [blob.payload.is_sealed for blob in found] == [True, False]


def test_sealing_twice_is_harmless_and_sealing_nothing_is_not(client):
    object_id = put(client, b"x")
    client.seal([object_id])
    with refused(Status.OBJECT_NOT_EXISTS):
        client.seal([NOBLOB])


def test_one_refusal_does_not_stop_the_others(client):
    blobs = client.create_blobs([1, 1])
    with refused(Status.OBJECT_NOT_EXISTS):
        client.seal([blobs[0].object_id, NOBLOB, blobs[1].object_id])
    assert [blob.payload.is_sealed for blob in client.get_blobs([b.object_id for b in blobs])] == [
        True,
        True,
    ]


def test_shrinking_keeps_the_front(client):
    blob = client.create_blob(100)
    blob.view[:] = bytes(range(100))
    client.shrink_blob(blob.object_id, 10)
    with refused(Status.INVALID):
        client.shrink_blob(blob.object_id, 50)
    client.seal([blob.object_id])
    assert bytes(client.get_blob(blob.object_id).view) == bytes(range(10))
    with refused(Status.OBJECT_SEALED):
        client.shrink_blob(blob.object_id, 5)
    with refused(Status.OBJECT_NOT_EXISTS):
        client.shrink_blob(NOBLOB, 5)


def test_dropped_blobs_give_their_memory_back(client):
    before = client.status()["memory_usage"]
    ids = [put(client, bytes(MIB)), client.create_blob(MIB).object_id]
    assert client.status()["memory_usage"] == before + 2 * MIB
    client.drop_blobs(ids)
    assert client.status()["memory_usage"] == before
    assert client.get_blobs(ids) == [None, None]
    with refused(Status.OBJECT_NOT_EXISTS):
        client.drop_blobs(ids)


def test_what_does_not_fit_is_refused_and_leaves_nothing_behind(client):
    before = client.status()["memory_usage"]
    with refused(Status.NOT_ENOUGH_MEMORY):
        client.create_blob(MEMORY_BYTES + 1)
    with refused(Status.NOT_ENOUGH_MEMORY):
        client.create_blobs([MIB] * (MEMORY_BYTES // MIB + 3))
    assert client.status()["memory_usage"] == before
    assert len(client.create_blobs([MIB] * 8)) == 8


def test_large_blobs_arrive_whole(client, other):
    data = os.urandom(MIB) * 48
    object_id = put(client, data)
    assert other.get_blob(object_id).view == data


def test_holding_and_releasing(client, other):
    object_id = put(client, b"x")
    assert client.is_in_use(object_id)
    client.release([object_id])
    assert not client.is_in_use(object_id)
    client.release([object_id])
    other.get_blob(object_id)
    assert client.is_in_use(object_id)
    other.hold([object_id])
    other.release([object_id])
    assert not client.is_in_use(object_id)
    other.hold([object_id])
    other.close()
    wait_until(lambda: not client.is_in_use(object_id))
    assert not client.is_spilled(object_id)


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        threading.Event().wait(0.005)


# objects


def test_an_object_keeps_its_metadata_and_members(client, other):
    blob = put(client, b"data")
    tree = {"nbytes": 4, "text": 'é"\\\n', "number": 1 << 62, "yes": True, "float": 1.5}
    inner = make_object(client, buffer_=member(client, blob))
    outer = make_object(client, "kvferry::Outer", inner=member(client, inner), **tree)
    found = other.objects.get(outer)
    assert {key: found[key] for key in tree} == tree
    assert found["id"] == format_id(outer)
    assert found["typename"] == "kvferry::Outer"
    assert found["inner"]["id"] == format_id(inner)
    assert found["inner"]["buffer_"]["id"] == format_id(blob)
    assert isinstance(found["signature"], int)


def test_a_blob_has_metadata_too(client):
    blob = put(client, b"data")
    tree = client.objects.get(blob)
    assert (tree["typename"], tree["length"], tree["id"]) == (
        "vineyard::Blob", 4, format_id(blob),
    )  # fmt: skip
    # the whole memory, as a blob that is none
    assert client.objects.get(INVALID_ID)["length"] == MEMORY_BYTES


def test_many_objects_at_once_keep_their_order(client):
    ids = client.objects.create_many([{"typename": f"kvferry::N{n}"} for n in range(40)])
    found = client.objects.get_many([*ids[::-1], NOBODY, ids[0]])
    names = [tree and tree["typename"] for tree in found]
    assert names == [*(f"kvferry::N{n}" for n in reversed(range(40))), None, "kvferry::N0"]
    assert client.objects.exist([ids[3], NOBODY, NOBLOB]) == [True, False, False]


def test_objects_that_cannot_be_are_refused(client):
    with refused(Status.META_TREE_INVALID):
        client.objects.create({"nbytes": 1})
    with refused(Status.META_TREE_INVALID):
        client.objects.create_many([{"typename": "kvferry::Good"}, {"nbytes": 1}])


def test_objects_are_found_by_type(client):
    ids = {make_object(client, f"kvferry::Find{n}") for n in range(3)}
    make_object(client, "other::Type")
    assert client.objects.find("kvferry::Find*").keys() == ids
    assert client.objects.find("kvferry::Find[0-9]", regex=True).keys() == ids
    assert len(client.objects.find("kvferry::*", limit=2)) == 2
    assert client.objects.find("nothing") == {}
    assert put(client, b"x") in client.objects.find("vineyard::Blob")


def test_persisting(client):
    object_id = make_object(client)
    assert not client.objects.is_persistent(object_id)
    client.objects.persist([object_id])
    client.objects.persist([object_id])
    assert client.objects.is_persistent(object_id)
    assert client.objects.get(object_id)["transient"] is False
    with refused(Status.META_TREE_SUBTREE_NOT_EXISTS):
        client.objects.persist([NOBODY])
    with refused(Status.ASSERTION_FAILED):
        client.objects.persist([put(client, b"x")])


def test_labels(client):
    object_id = make_object(client)
    client.objects.label(object_id, {"k": "v", "other": "w"})
    client.objects.label(object_id, {"k": "z"})
    assert client.objects.get(object_id)["__labels"] == '{"k":"z","other":"w"}'
    with refused(Status.OBJECT_NOT_EXISTS):
        client.objects.label(NOBODY, {"k": "v"})


def test_a_copy_has_the_same_members(client):
    blob = put(client, b"x")
    object_id = make_object(client, member=member(client, blob))
    copy = client.objects.copy(object_id, {"more": 5})
    found = client.objects.get(copy)
    assert copy != object_id
    assert (found["more"], found["member"]["id"]) == (5, format_id(blob))
    assert "more" not in client.objects.get(object_id)
    with refused(Status.META_TREE_SUBTREE_NOT_EXISTS):
        client.objects.copy(NOBODY)


def test_deleting_takes_members_along_unless_told_otherwise(client):
    def nest():
        blob, direct = put(client, b"x"), put(client, b"y")
        inner = make_object(client, m=member(client, blob))
        outer = make_object(client, inner=member(client, inner), m=member(client, direct))
        return [outer, inner, blob, direct]

    deep, shallow = nest(), nest()
    client.objects.delete([deep[0]])
    assert client.objects.exist(deep) == [False, False, False, False]
    # an object's own blobs go with it in any case
    client.objects.delete([shallow[0]], deep=False)
    assert client.objects.exist(shallow) == [False, True, True, False]
    client.objects.delete([NOBODY])


def test_deleting_tells_which_blobs_went(client):
    blob = put(client, b"x")
    object_id = make_object(client, m=member(client, blob))
    assert client.objects.delete_and_tell([object_id]) == [blob]


def test_a_member_of_something_else_stays_unless_forced(client):
    blob = put(client, b"x")
    object_id = make_object(client, m=member(client, blob))
    client.objects.delete([blob])
    assert client.objects.exist([object_id, blob]) == [True, True]
    client.objects.delete([blob], force=True)
    assert client.objects.exist([object_id, blob]) == [False, False]


def test_the_fast_path_is_for_blobs(client):
    blob = put(client, b"x")
    client.objects.delete([blob], fastpath=True)
    assert client.objects.exist([blob]) == [False]
    with refused(Status.ASSERTION_FAILED):
        client.objects.delete([make_object(client)], fastpath=True)


# names


@pytest.mark.parametrize("name", ["plain", "with/slash~and *", "umlaut ä 名", "x" * 300])
def test_a_name_leads_to_its_object(client, other, name):
    object_id = make_object(client)
    client.objects.persist([object_id])
    client.names.put(name, object_id)
    assert other.names.get(name) == object_id
    assert other.names.find() == {name: object_id}
    other.names.drop([name, "never put"])
    assert client.names.get(name) is None
    assert client.names.find() == {}


def test_names_in_batches(client):
    ids = client.objects.create_many([{"typename": "kvferry::T"}] * 50)
    client.objects.persist(ids)
    trips = client.round_trips
    client.names.put_many({f"n{index}": object_id for index, object_id in enumerate(ids)})
    names = [f"n{index}" for index in range(52)]
    assert client.names.get_many(names) == [*ids, None, None]
    client.names.drop(names)
    assert client.round_trips == trips + 3
    assert client.names.find() == {}


def test_names_are_found_by_pattern(client):
    object_id = make_object(client)
    client.objects.persist([object_id])
    client.names.put_many(dict.fromkeys(["ab", "ac", "b"], object_id))
    assert sorted(client.names.find("a*")) == ["ab", "ac"]
    assert sorted(client.names.find("a.", regex=True)) == ["ab", "ac"]
    assert len(client.names.find(limit=2)) == 2


def test_a_name_moves_to_another_object(client):
    first, second = client.objects.create_many([{"typename": "kvferry::T"}] * 2)
    client.objects.persist([first, second])
    client.names.put("n", first)
    client.names.put("n", second)
    assert client.names.get("n") == second


def test_what_cannot_be_named_is_refused(client):
    with refused(Status.INVALID):
        client.names.put("n", put(client, b"x"))
    with refused(Status.INVALID):
        client.names.put("n", make_object(client))
    with refused(Status.OBJECT_NOT_EXISTS):
        client.names.put("n", NOBODY)


def test_a_name_can_be_waited_for(client, other):
    object_id = make_object(client)
    client.objects.persist([object_id])
    found = []
    waiter = threading.Thread(
        target=lambda: found.append(other.names.get("later", wait=True, timeout_s=30))
    )
    waiter.start()
    # the waiter is connected before there is a name, so that it does wait
    wait_until(lambda: other.is_connected)
    client.names.put("later", object_id)
    waiter.join(30)
    assert found == [object_id]


# streams


def make_stream(client):
    object_id = make_object(client, "vineyard::ByteStream", params_="{}")
    client.streams.create(object_id)
    return object_id


def test_chunks_arrive_in_order_and_end(client, other):
    stream = make_stream(client)
    client.streams.open_writer(stream)
    other.streams.open_reader(stream)
    for index in range(5):
        chunk = client.streams.next_chunk(stream, 8 + index)
        chunk.view[:] = bytes([index]) * (8 + index)
    client.streams.stop(stream)
    for index in range(5):
        pulled = other.streams.pull(stream)
        assert bytes(other.get_blob(pulled).view) == bytes([index]) * (8 + index)
    assert other.streams.pull(stream) is None
    client.streams.drop(stream)


def test_a_reader_waits_for_its_writer(client, other):
    stream = make_stream(client)
    client.streams.open_writer(stream)
    other.streams.open_reader(stream)
    pulled = []
    reader = threading.Thread(target=lambda: pulled.append(other.streams.pull(stream, 30)))
    reader.start()
    client.streams.next_chunk(stream, 4).view[:] = b"late"
    client.streams.stop(stream)
    reader.join(30)
    assert bytes(client.get_blob(pulled[0]).view) == b"late"


def test_a_failed_writer_is_noticed(client, other):
    stream = make_stream(client)
    client.streams.open_writer(stream)
    other.streams.open_reader(stream)
    client.streams.stop(stream, failed=True)
    with refused(Status.STREAM_FAILED):
        other.streams.pull(stream)


def test_a_stream_has_one_reader_and_one_writer(client, other):
    stream = make_stream(client)
    client.streams.open_writer(stream)
    with refused(Status.STREAM_OPENED):
        other.streams.open_writer(stream)
    other.streams.open_reader(stream)
    with refused(Status.STREAM_OPENED):
        client.streams.open_reader(stream)
    with refused(Status.OBJECT_EXISTS):
        client.streams.create(stream)
    with refused(Status.OBJECT_NOT_EXISTS):
        client.streams.open_reader(NOBODY)


# the daemon


def test_the_daemon_in_numbers(client):
    before = client.status()
    put(client, bytes(1000))
    after = client.status()
    assert after["memory_usage"] == before["memory_usage"] + 1000
    assert after["memory_limit"] == MEMORY_BYTES
    assert after["ipc_connections"] >= 1
    assert client.cluster()["i0"]["ipc_socket"] == client.path
    assert client.memory_trim() in (True, False)
    client.debug({})


def test_an_object_that_is_here_need_not_be_fetched(client):
    object_id = make_object(client)
    assert client.migrate(object_id) == object_id
    with refused(Status.META_TREE_SUBTREE_NOT_EXISTS):
        client.migrate(NOBODY)


def test_clearing_leaves_nothing(client):
    before = client.status()["memory_usage"]
    object_id = make_object(client, m=member(client, put(client, b"x")))
    client.create_blob(100)
    client.clear()
    assert client.objects.exist([object_id]) == [False]
    assert client.status()["memory_usage"] == before


def test_registering_tells_of_the_daemon(client):
    registered = client.connect()
    assert registered.store_match
    assert registered.ipc_socket == client.path
    assert registered.version.split(".")[0] == "0"


# connections


def test_two_clients_at_once_from_many_threads(client, other):
    failures = []

    def work(seed, mine):
        try:
            for turn in range(30):
                data = bytes([seed, turn]) * (50 + turn)
                object_id = put(mine, data)
                assert bytes(mine.get_blob(object_id).view) == data
                mine.drop_blobs([object_id])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n, [client, other][n % 2])) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert client.connects == other.connects == 1


def test_a_pipelined_batch_with_large_replies_does_not_lock_up(client):
    text = "x" * 20_000
    ids = [make_object(client, text=text) for _ in range(20)]
    from kvferry.kvops.vineyard.object_messages import GetDataRequest

    # 4 MB of replies, far more than the sockets hold, and requests that exceed what may be under way
    requests = [GetDataRequest([ids[n % 20]] + [NOBODY] * 200) for n in range(200)]
    replies = client.batch(requests)
    assert [reply.content[ids[n % 20]]["text"] for n, reply in enumerate(replies)] == [text] * 200
    long_request = GetDataRequest(ids + [NOBODY] * 40_000)
    replies = client.batch([*requests[:3], long_request, *requests[:3], long_request])
    assert [len(reply.content) for reply in replies] == [1, 1, 1, 20, 1, 1, 1, 20]


def test_closing_is_final_and_views_survive(daemon):
    client = Client(daemon.socket)
    object_id = put(client, b"kept")
    view = client.get_blob(object_id).view
    client.close()
    client.close()
    assert bytes(view) == b"kept"
    with pytest.raises(VineyardConnectionError, match="is closed"):
        client.status()


def test_descriptors_do_not_leak(daemon):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(5):
        with Client(daemon.socket) as client:
            put(client, b"x")
            client.get_blob(put(client, b"y"))
    assert descriptors() == before


def mappings():
    with open("/proc/self/maps") as maps:
        return sum("vineyard" in line or "kvferry" in line for line in maps)


def test_memory_is_mapped_once_per_file(client):
    first = put(client, b"x")
    held = client.get_blob(first).view
    before = mappings()
    for _ in range(3):
        # a lost connection: the same file comes again
        client._drop()
        assert bytes(client.get_blob(first).view) == b"x"
    assert client.connects == 4
    assert mappings() == before
    assert bytes(held) == b"x"


def test_memory_of_a_dead_daemon_is_let_go(own_daemon):
    before = mappings()
    with Client(own_daemon.socket, timeout_s=20) as client:
        view = client.get_blob(put(client, b"before")).view
        for _ in range(2):
            own_daemon.kill()
            own_daemon.start()
            put(client, b"after")
        assert mappings() == before + 2
        assert bytes(view) == b"before"
        view.release()
        assert mappings() == before + 1
    assert mappings() == before


FORKING = """
import os, sys, threading
from kvferry.kvops.vineyard.client import Client

client = Client(sys.argv[1])
blob = client.create_blob(6)
blob.view[:] = b"parent"
client.seal([blob.object_id])
# another thread is in the middle of a call, and its lock held, when the process forks
client._lock.acquire()
child = os.fork()
if child == 0:
    code = 1
    try:
        assert bytes(client.get_blob(blob.object_id).view) == b"parent"
        assert client.connects == 2
        code = 0
    finally:
        os._exit(code)
client._lock.release()
assert os.waitpid(child, 0)[1] == 0
assert bytes(client.get_blob(blob.object_id).view) == b"parent"
assert client.connects == 1
print("fine")
"""


def test_a_forked_child_gets_its_own_connection(daemon):
    # in a process of its own: forking one that has threads is a warning from Python 3.12 on
    command = [sys.executable, "-c", FORKING, str(daemon.socket)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "fine\n", done.stderr


def test_a_clone_is_a_second_connection(client):
    with client.clone() as clone:
        object_id = put(client, b"x")
        assert bytes(clone.get_blob(object_id).view) == b"x"
    assert client.objects.exist([object_id]) == [True]


def test_a_dead_daemon_is_an_error_at_once_and_back_when_it_is(own_daemon):
    with Client(own_daemon.socket, timeout_s=20) as client:
        view = client.get_blob(put(client, b"before")).view
        own_daemon.kill()
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(VineyardConnectionError):
                client.create_blob(10)
            assert time.monotonic() - began < 5
        assert bytes(view) == b"before"
        assert not client.is_connected
        own_daemon.start()
        assert bytes(client.get_blob(put(client, b"after")).view) == b"after"
        assert client.connects == 2
        assert bytes(view) == b"before"


def test_a_call_that_found_the_daemon_gone_goes_to_the_new_one(own_daemon):
    with Client(own_daemon.socket, timeout_s=20) as client:
        client.status()
        own_daemon.kill()
        own_daemon.start()
        # nothing of it could be sent to the old one, so that sending it again is safe
        assert client.create_blob(10).object_id
        assert client.connects == 2


def test_a_daemon_that_hangs_is_given_up_in_time(own_daemon):
    with Client(own_daemon.socket, timeout_s=20) as client:
        put(client, b"x")
        own_daemon.pause()
        client.timeout_s = 0.3
        began = time.monotonic()
        with pytest.raises(VineyardTimeoutError, match=r"within 0\.3 s"):
            client.status()
        with pytest.raises(VineyardTimeoutError):
            client.create_blobs([1] * 5000)
        assert time.monotonic() - began < 5
        own_daemon.resume()
        client.timeout_s = 20
        assert client.status()["memory_usage"] >= 1


def test_blobs_of_a_client_that_is_killed_after_sealing_stay(daemon, client):
    script = (
        "import os, sys\n"
        "from kvferry.kvops.vineyard.client import Client\n"
        "client = Client(sys.argv[1])\n"
        "blob = client.create_blob(4)\n"
        "blob.view[:] = b'kept'\n"
        "client.seal([blob.object_id])\n"
        "print(blob.object_id, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(daemon.socket)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert bytes(client.get_blob(int(output)).view) == b"kept"
