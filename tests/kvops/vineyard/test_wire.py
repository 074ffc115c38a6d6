"""Messages: written, read, and read when they are wrong."""

import json
from typing import get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kvops.errors import VineyardProtocolError, VineyardStatusError
from kvferry.kvops.vineyard import fields, payload
from kvferry.kvops.vineyard import wire as w
from kvferry.kvops.vineyard.blob_messages import (
    CreateBufferReply,
    CreateBufferRequest,
    CreateBuffersReply,
    GetBuffersReply,
    GetBuffersRequest,
    SealReply,
    SealRequest,
)
from kvferry.kvops.vineyard.codec import CODECS, REPLIES, REQUESTS
from kvferry.kvops.vineyard.daemon_messages import DebugReply, RegisterRequest
from kvferry.kvops.vineyard.ids import (
    BLOB_BIT,
    IdMaker,
    format_id,
    is_blob,
    parse_id,
)
from kvferry.kvops.vineyard.object_messages import (
    CreateDataRequest,
    GetDataReply,
    GetNameRequest,
    ListNameReply,
    PutNameRequest,
)
from kvferry.kvops.vineyard.payload import Payload
from kvferry.kvops.vineyard.status import Status, status_error

from .hostile import TRANSCRIPT, check_many

CASES = [json.loads(line) for line in TRANSCRIPT.read_text().splitlines()]

u64 = st.integers(0, (1 << 64) - 1)
size = st.integers(0, (1 << 63) - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
json_value = st.recursive(
    st.none() | st.booleans() | u64 | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(text, below, max_size=4),
    max_leaves=10,
)
tree = st.dictionaries(text, json_value, max_size=5)


@st.composite
def payloads(draw):
    map_size = draw(st.integers(8, 1 << 40))
    data_size = draw(st.integers(0, map_size - 8))
    return Payload(
        draw(u64),
        draw(st.integers(0, 1000)),
        draw(st.integers(0, map_size - 8 - data_size)),
        data_size,
        map_size,
        draw(u64),
        *draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        draw(st.integers(0, 4096)),
    )


STRATEGIES = {
    fields.ObjectId: u64,
    fields.ObjectIds: st.lists(u64, max_size=5),
    fields.Size: size,
    fields.Sizes: st.lists(size, max_size=5),
    fields.Number: st.integers(-(1 << 63), (1 << 63) - 1),
    fields.Descriptor: st.integers(-1, (1 << 31) - 1),
    fields.Descriptors: st.lists(st.integers(0, (1 << 31) - 1), max_size=3),
    fields.Flag: st.booleans(),
    fields.Text: text,
    fields.Texts: st.lists(text, max_size=3),
    fields.Metadata: tree,
    fields.Metadatas: st.lists(tree, max_size=3),
    fields.MetadataById: st.dictionaries(u64, tree, max_size=3),
    fields.IdsByName: st.dictionaries(text, u64, max_size=3),
    fields.Json: json_value,
    payload.PayloadField: payloads(),
    payload.Payloads: st.lists(payloads(), max_size=4),
}


def decode(message_text, message):
    codec = CODECS[message]
    if REQUESTS.get(codec.wire_name) == codec:
        return w.decode_request(message_text)
    return w.decode_reply(message_text, message)


def strategy_of(message):
    hints = get_type_hints(message, include_extras=True)
    drawn = [STRATEGIES.get(hint, st.just(1)) for hint in hints.values()]
    if message is CreateBuffersReply:
        return st.lists(payloads(), max_size=4).map(
            lambda places: CreateBuffersReply([p.object_id for p in places], places, [7])
        )
    return st.tuples(*drawn).map(lambda values: message(*values))


@pytest.mark.parametrize("message", CODECS, ids=lambda message: message.__name__)
def test_every_message_survives_the_wire(message):
    @settings(max_examples=12, deadline=None, database=None)
    @given(strategy_of(message))
    def survives(sent):
        received = decode(w.encode(sent), message)
        assert type(received) is message
        assert received == sent

    survives()


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{n}-{c['message'].get('type', 'error')}" for n, c in enumerate(CASES)]
)
def test_what_the_stock_daemon_and_client_said_is_understood(case):
    message, sent = case["message"], json.dumps(case["message"]).encode()
    if case["from"] == "client":
        decoded = w.decode_request(sent)
        again = w.decode_request(w.encode(decoded))
    elif "code" in message:
        with pytest.raises(VineyardStatusError) as refusal:
            w.decode_reply(sent, SealReply)
        assert (refusal.value.code, refusal.value.reason) == (message["code"], message["message"])
        return
    else:
        decoded = w.decode_reply(sent, REPLIES[message["type"]].message)
        again = w.decode_reply(w.encode(decoded), type(decoded))
    assert again == decoded
    ours = json.loads(w.encode(decoded))
    # what is said twice in the stock form, or means nothing, may be missing from ours; what is there is the same
    for key in ours.keys() & message.keys() - {"payloads", "created", "buffer"}:
        if not key.isdigit():
            assert ours[key] == message[key]


def test_every_request_names_its_reply_and_every_reply_is_used():
    answers = {codec.reply for codec in REQUESTS.values()} - {None}
    assert answers == {codec.message for codec in REPLIES.values()}
    assert [name for name, codec in REQUESTS.items() if codec.reply is None] == ["exit_request"]
    assert not w.NOT_SERVED & REQUESTS.keys()


def test_a_blob_list_is_read_in_both_of_its_forms():
    place = {
        "object_id": 5, "store_fd": 3, "data_offset": 0, "data_size": 1, "map_size": 64, "pointer": 0,
    }  # fmt: skip
    listed = {"type": "get_buffers_reply", "num": 1, "fds": [3], "payloads": [place]}
    numbered = {"type": "get_buffers_reply", "num": 1, "fds": [3], "0": place}
    expected = GetBuffersReply([Payload(5, 3, 0, 1, 64)], [3])
    for form in (listed, numbered):
        assert w.decode_reply(json.dumps(form).encode(), GetBuffersReply) == expected
    request = b'{"type":"get_buffers_request","num":2,"0":7,"1":8}'
    assert w.decode_request(request) == GetBuffersRequest([7, 8])


def test_the_stock_client_finds_new_blobs_by_number():
    sent = json.loads(w.encode(CreateBuffersReply([5], [Payload(5, 3, 0, 1, 64)], [3])))
    assert sent["num"] == 1
    assert sent["0"]["object_id"] == 5


def test_defaults_are_those_of_the_stock_daemon():
    assert w.decode_request(b'{"type":"register_request"}') == RegisterRequest()
    assert (
        w.decode_request(b'{"type":"register_request","store_type":"Normal"}').store_type
        == "Normal"
    )
    assert w.decode_reply(b'{"type":"list_name_reply"}', ListNameReply).names == {}
    nothing = w.decode_reply(b'{"type":"get_data_reply","content":null}', GetDataReply)
    assert nothing.content == {}
    assert json.loads(w.encode(nothing))["content"] is None
    assert w.decode_request(b'{"type":"put_name_request","object_id":1,"name":"n"}').overwrite


PLACE = '{"object_id":1,"store_fd":3,"data_offset":%s,"data_size":%s,"map_size":%s,"pointer":0}'
WRONG = {
    "empty": b"",
    "no JSON": b"hello",
    "two objects": b"{}{}",
    "no object": b"[]",
    "NUL at the end": b'{"type":"exit_request"}\0',
    "no UTF-8": b'{"type":"\xff"}',
    "no type": b"{}",
    "type is a number": b'{"type":5}',
    "NaN": b'{"type":"debug_command","debug":NaN}',
    "infinite": b'{"type":"debug_command","debug":1e999}',
    "half a surrogate": b'{"type":"get_name_request","name":"\\ud800"}',
    "field missing": b'{"type":"seal_request"}',
    "id is text": b'{"type":"seal_request","object_id":"5"}',
    "id is a float": b'{"type":"seal_request","object_id":5.0}',
    "id is a bool": b'{"type":"seal_request","object_id":true}',
    "id is negative": b'{"type":"seal_request","object_id":-1}',
    "id has 65 bits": b'{"type":"seal_request","object_id":18446744073709551616}',
    "id has 9000 digits": b'{"type":"seal_request","object_id":' + b"9" * 9000 + b"}",
    "size has 64 bits": b'{"type":"create_buffer_request","size":9223372036854775808}',
    "size is a list": b'{"type":"create_buffer_request","size":[1]}',
    "one id is text": b'{"type":"release_request","object_id":null}',
    "count without members": b'{"type":"get_buffers_request","num":1000000000000}',
    "count beyond members": b'{"type":"get_buffers_request","num":2,"0":1}',
    "count is negative": b'{"type":"get_buffers_request","num":-1}',
    "flag is a number": b'{"type":"get_buffers_request","ids":[],"unsafe":1}',
    "name is long": b'{"type":"get_name_request","name":"' + b"x" * 70_000 + b'"}',
    "metadata is a list": b'{"type":"create_data_request","content":[]}',
    "nested deep": b'{"type":"debug_command","debug":' + b"[" * 70 + b"]" * 70 + b"}",
    "nested deeper": b'{"type":"debug_command","debug":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "nested unclosed": b"[" * 1_000_000,
    "list is long": b'{"type":"evict_request","ids":[' + b"1," * 300_000 + b"1]}",
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_request_is_our_error(wrong):
    with pytest.raises(VineyardProtocolError) as error:
        w.decode_request(wrong)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("offset", "size", "map_size"),
    [
        (0, 57, 64),
        (57, 1, 64),
        (-1, 1, 64),
        (0, -1, 64),
        (1 << 62, 1 << 62, 64),
        (0, 1, 0),
        (0, 1, -1),
    ],
)
def test_a_blob_outside_its_file_is_our_error(offset, size, map_size):
    reply = (
        '{"type":"create_buffer_reply","id":1,"created":' + PLACE % (offset, size, map_size) + "}"
    )
    with pytest.raises(VineyardProtocolError):
        w.decode_reply(reply.encode(), CreateBufferReply)


def test_a_reply_of_another_kind_is_our_error():
    for wrong in [
        b'{"type":"seal_request"}',
        b'{"type":"drop_buffer_reply"}',
        b"{}",
        b'{"code":"x"}',
    ]:
        with pytest.raises(VineyardProtocolError):
            w.decode_reply(wrong, SealReply)


def test_unknown_requests_are_answered_like_the_stock_daemon_does():
    with pytest.raises(VineyardStatusError, match="Got unexpected command: make_coffee") as refusal:
        w.decode_request(b'{"type":"make_coffee"}')
    assert refusal.value.code == Status.INVALID
    for name in w.NOT_SERVED:
        with pytest.raises(VineyardStatusError) as refusal:
            w.decode_request(json.dumps({"type": name}).encode())
        assert refusal.value.code == Status.NOT_IMPLEMENTED


def test_unknown_fields_are_ignored():
    assert w.decode_request(b'{"type":"seal_request","object_id":5,"new":[1]}') == SealRequest(5)


def test_an_error_reply_can_always_be_sent():
    for reason in ["plain", 'a "quote"\n', "\ud800", "x" * 1_000_000, ""]:
        with pytest.raises(VineyardStatusError) as refusal:
            w.decode_reply(w.encode_error(Status.IO_ERROR, reason), SealReply)
        assert refusal.value.code == Status.IO_ERROR
        assert reason[:5].replace("\ud800", "?") in refusal.value.reason
    assert w.decode_reply(b'{"code":0,"type":"seal_reply"}', SealReply) == SealReply()


def test_metadata_without_a_form_in_json_is_our_error():
    for value in [float("nan"), float("inf"), b"bytes", {1, 2}, object()]:
        with pytest.raises(VineyardProtocolError):
            w.encode(CreateDataRequest({"x": value}))


def test_descriptors_that_follow_a_reply():
    place = Payload(5, 3, 0, 1, 64)
    assert w.descriptors_after(CreateBufferReply(5, place, 3)) == [3]
    assert w.descriptors_after(CreateBufferReply(5, place)) == []
    assert w.descriptors_after(GetBuffersReply([place], [3, 9])) == [3, 9]
    assert w.descriptors_after(SealReply()) == []
    assert w.descriptors_after(DebugReply({"fd": 5})) == []


def test_names_travel_unchanged():
    for name in ['"', "\\", "\n", "ä", "\U0001f600", "a/b~c", "\x00"]:
        for sent in (PutNameRequest(1, name), GetNameRequest(name)):
            assert w.decode_request(w.encode(sent)) == sent


def test_ids():
    maker = IdMaker()
    made = [maker.object_id() if n % 2 else maker.blob_id() for n in range(20_000)]
    assert len({object_id & ~BLOB_BIT for object_id in made}) == len(made)
    assert [is_blob(object_id) for object_id in made[:4]] == [True, False, True, False]
    assert format_id(0x688B13F551800023) == "o688b13f551800023"
    assert parse_id("o688b13f551800023") == 0x688B13F551800023
    assert all(parse_id(format_id(object_id)) == object_id for object_id in made[:100])
    for wrong in [
        "",
        "o",
        "688b13f551800023",
        "o" + "f" * 17,
        "o-1",
        "o 1",
        "o1\n",
        5,
        None,
        "o\uff11",
    ]:
        with pytest.raises(VineyardProtocolError):
            parse_id(wrong)


def test_ids_go_on_when_the_clock_is_set_back(monkeypatch):
    maker = IdMaker(instance=3)
    made = [maker.object_id() for _ in range(10)]
    monkeypatch.setattr("time.time_ns", lambda: 5)
    made += [maker.object_id() for _ in range(10)]
    assert made == sorted(set(made))


def test_errors_carry_their_code_and_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(status_error(Status.STREAM_DRAINED, "no more")))
    assert (error.code, error.reason) == (42, "no more")
    assert issubclass(CreateBufferRequest, tuple)


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, (1 << 63) - 1))
def test_hostile_texts_are_messages_or_our_errors(seed):
    # 100 examples of 100 texts each, both directions and the framing
    check_many(seed, 100)
