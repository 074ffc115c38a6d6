"""Our client and the stock Python client (vineyard 0.24.2) on one daemon: what one puts, the other reads."""

import array
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.kvops.vineyard.ids import format_id, parse_id


def python_with_vineyard():
    named = os.environ.get("KVFERRY_VINEYARD_PYTHON")
    if named:
        return named
    try:
        importlib.metadata.distribution("vineyard")
    except importlib.metadata.PackageNotFoundError:
        return None
    return sys.executable


class Official:
    """The stock client, in a process of its own."""

    def __init__(self, socket):
        script = Path(__file__).with_name("official_client.py")
        self._process = subprocess.Popen(
            [python_with_vineyard(), "-W", "ignore", str(script), str(socket)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.version = json.loads(self._process.stdout.readline())

    def __call__(self, name, *arguments):
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(60) == 0


@pytest.fixture(scope="session")
def shared_official(shared_daemon):
    if python_with_vineyard() is None:
        pytest.skip(
            "the stock client is not here: pip install vineyard==0.24.2 (450 MB with what it needs), or set"
            " KVFERRY_VINEYARD_PYTHON to a Python that has it"
        )
    official = Official(shared_daemon.socket)
    yield official
    official.close()


@pytest.fixture
def official(daemon, shared_official):
    return shared_official


def put(client, data):
    blob = client.create_blob(len(data))
    blob.view[:] = data
    client.seal([blob.object_id])
    return blob.object_id


def tensor(client, values, shape):
    """An object as the stock client makes of a numpy array of float32."""
    data = array.array("f", values).tobytes()
    return client.objects.create(
        {
            "typename": "vineyard::Tensor<float>",
            "nbytes": len(data),
            "shape_": json.dumps(shape),
            "partition_index_": "[]",
            "order_": '"C"',
            "value_type_": "float32",
            "value_type_meta_": "<f4",
            "buffer_": client.objects.get(put(client, data)),
        }
    )


def test_it_reads_our_blobs(client, official):
    assert official.version == "0.24.2"
    ids = [put(client, f"blob {n}".encode()) for n in range(5)]
    texts = [format_id(object_id) for object_id in ids]
    assert official("get_blob", texts[0]) == "blob 0"
    assert official("get_blobs", texts[::-1]) == [f"blob {n}" for n in reversed(range(5))]
    assert official("get_blob", format_id(ids[0] + 99)) is None


def test_we_read_its_blobs(client, official):
    ids = [parse_id(official("put_blob", f"blob {n}")) for n in range(5)]
    assert [bytes(blob.view) for blob in client.get_blobs(ids)] == [
        f"blob {n}".encode() for n in range(5)
    ]


def test_it_reads_our_arrays(client, official):
    object_id = tensor(client, range(12), [3, 4])
    found = official("get", format_id(object_id))
    assert found == {"dtype": "float32", "shape": [3, 4], "values": [float(n) for n in range(12)]}


@pytest.mark.parametrize(("dtype", "code"), [("float32", "f"), ("int64", "q"), ("uint8", "B")])
def test_we_read_its_arrays(client, official, dtype, code):
    tree = client.objects.get(parse_id(official("put_array", dtype, [6, 7])))
    assert json.loads(tree["shape_"]) == [6, 7]
    assert tree["value_type_"] == dtype
    view = client.get_blob(parse_id(tree["buffer_"]["id"])).view
    assert view.cast(code).tolist() == list(range(42))


def test_we_find_what_is_inside_its_tables_and_tuples(client, official):
    frame = client.objects.get(parse_id(official("put_frame", 10)))
    assert frame["typename"] == "vineyard::DataFrame"
    nested = client.objects.get(parse_id(official("put_nested")))
    assert nested["typename"] == "vineyard::Sequence"
    members = [value["typename"] for value in nested.values() if isinstance(value, dict)]
    assert len(members) == 4


def test_names_given_by_one_are_found_by_the_other(client, official):
    ours = tensor(client, range(3), [3])
    client.objects.persist([ours])
    client.names.put("ours/1", ours)
    theirs = official("put_array", "uint8", [3])
    official("put_name", theirs, "theirs/1")
    assert parse_id(official("get_name", "ours/1")) == ours
    assert client.names.get("theirs/1") == parse_id(theirs)
    expected = {"ours/1": ours, "theirs/1": parse_id(theirs)}
    assert client.names.find() == expected
    assert {name: parse_id(text) for name, text in official("list_names").items()} == expected


def test_deletes_by_one_are_seen_by_the_other(client, official):
    ours, theirs = tensor(client, range(3), [3]), official("put_array", "uint8", [3])
    official("delete", format_id(ours))
    client.objects.delete([parse_id(theirs)])
    assert client.objects.get(ours) is None
    assert official("exists", theirs) is False
