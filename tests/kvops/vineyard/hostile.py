"""Texts that a broken or hostile peer might send, made from valid ones; and what must hold for each of them."""

import functools
import json
import random
import string
from pathlib import Path

from kvferry.kvops.errors import VineyardProtocolError, VineyardStatusError
from kvferry.kvops.vineyard.codec import REPLIES, REQUESTS
from kvferry.kvops.vineyard.framing import HEADER_BYTES, FrameReader, frame
from kvferry.kvops.vineyard.wire import NOT_SERVED, decode_reply, decode_request, encode

TRANSCRIPT = Path(__file__).with_name("transcript.jsonl")
REFUSALS = (VineyardProtocolError, VineyardStatusError)
STREAM_LIMIT_BYTES = 1 << 16

NUMBERS = [
    b"-1", b"0", b"1", b"2147483647", b"2147483648", b"9223372036854775807", b"9223372036854775808",
    b"18446744073709551615", b"18446744073709551616", b"1e400", b"-1e400", b"1.5", b"1e2", b"NaN", b"Infinity",
    b"9" * 5000, b"true", b"null", b'"5"', b"[]", b"{}", b"-0", b"0.0",
]  # fmt: skip
PIECES = [
    b"[" * 3000, b'{"a":' * 3000, b'"\\ud800"', b'"\\uD800\\uDC00"', b'"\\u0000"', b"\xff\xfe", b"\x00", b'\\"',
    b"}" * 5, b"/*", b'"num":99999999999,', b'"0":1,', b'"ids":[1,2,', b'"fds":[-1],', b'"fd":7,', b'"code":0,',
    b'"code":14,', b'"type":"seal_reply",', b'"type":5,', b"\xed\xa0\x80", b"[[[[[[[[", b" " * 100,
]  # fmt: skip
KEYS = [
    *{key for codec in [*REQUESTS.values(), *REPLIES.values()] for key in codec.message._fields},
    "type", "num", "code", "message", "0", "1", "user_offset", "store_fd", "map_size", "data_size", "data_offset",
]  # fmt: skip


@functools.cache
def valid_texts():
    """Every message of the transcript, and an emptied one of every other type."""
    texts = [
        json.dumps(json.loads(line)["message"]).encode()
        for line in TRANSCRIPT.read_text().splitlines()
    ]
    names = sorted({*REQUESTS, *REPLIES, *NOT_SERVED})
    return texts + [b'{"type":"%s"}' % name.encode() for name in names]


def random_json(rng, depth=0):
    kind = rng.randrange(8 if depth < 4 else 6)
    if kind == 0:
        return rng.choice([True, False, None])
    if kind == 1:
        return rng.choice([0, -1, 1, 1 << 31, 1 << 63, (1 << 64) - 1, 1 << 64, rng.getrandbits(70)])
    if kind == 2:
        return rng.uniform(-1e9, 1e9)
    if kind < 6:
        return "".join(rng.choices(string.printable + "äß\u2028\U0001f600\x00", k=rng.randrange(8)))
    if kind == 6:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {rng.choice(KEYS): random_json(rng, depth + 1) for _ in range(rng.randrange(6))}


def fields_changed(rng, text):
    """A valid message with members removed, added or given another value."""
    tree = json.loads(text)
    places = [tree]
    for value in list(tree.values()):
        places += [
            item
            for item in (value if isinstance(value, list) else [value])
            if isinstance(item, dict)
        ]
    place = rng.choice(places)
    for _ in range(rng.randrange(1, 4)):
        action = rng.randrange(3)
        if action == 0 and place:
            del place[rng.choice(list(place))]
        elif action == 1 and place:
            place[rng.choice(list(place))] = random_json(rng)
        else:
            place[rng.choice(KEYS)] = random_json(rng)
    return json.dumps(tree).encode()


def bytes_changed(rng, text):
    """A text cut, flipped, doubled or joined with another."""
    changed = bytearray(text)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(changed) + 1)
        end = min(len(changed), place + rng.randrange(12))
        action = rng.randrange(7)
        if action == 0 and place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
        elif action == 1:
            del changed[place:end]
        elif action == 2:
            changed[place:place] = changed[place:end] * rng.randrange(1, 4)
        elif action == 3:
            changed[place:place] = rng.randbytes(rng.randrange(6))
        elif action == 4:
            changed[place:end] = rng.choice(PIECES)
        elif action == 5:
            other = rng.choice(valid_texts())
            changed[place:] = other[rng.randrange(len(other)) :]
        else:
            changed[place:end] = rng.choice(NUMBERS)
    return bytes(changed)


def hostile_texts(seed, count):
    """Yield *count* texts, the same ones for the same *seed*."""
    rng = random.Random(seed)
    for _ in range(count):
        text = rng.choice(valid_texts())
        choice = rng.randrange(10)
        if choice < 4:
            text = fields_changed(rng, text)
        elif choice < 8:
            text = bytes_changed(rng, text)
        elif choice == 8:
            text = bytes_changed(rng, fields_changed(rng, text))
        else:
            text = rng.randbytes(rng.randrange(40))
        yield text


def check_text(text, rng):
    """Decode *text* as everything it could be; only messages that survive a round trip, or our errors, come out.

    Returns:
        How many of the two directions understood it.
    """
    understood = 0
    try:
        request = decode_request(text)
    except REFUSALS:
        pass
    else:
        again = decode_request(encode(request))
        assert (type(again), again) == (type(request), request)
        understood += 1
    expected = rng.choice(_replies())
    for wire_name, codec in REPLIES.items():
        if wire_name.encode() in text:
            expected = codec.message
    try:
        reply = decode_reply(text, expected)
    except REFUSALS:
        pass
    else:
        again = decode_reply(encode(reply), expected)
        assert (type(again), again) == (type(reply), reply)
        understood += 1
    return understood


@functools.cache
def _replies():
    return [codec.message for codec in REPLIES.values()]


def check_stream(texts, rng):
    """Feed frames, some with a damaged header, in random pieces; the reader gives the texts or our error."""
    stream, intact, damaged = b"", [], False
    for text in texts:
        framed = bytearray(frame(text))
        if rng.randrange(20) == 0:
            framed[rng.randrange(HEADER_BYTES)] ^= 1 << rng.randrange(8)
            damaged = True
        if not damaged:
            intact.append(text)
        stream += framed
    reader = FrameReader(STREAM_LIMIT_BYTES)
    found, place = [], 0
    try:
        while place < len(stream):
            step = rng.choice([1, 3, 8, 9, 100, 5000])
            reader.feed(stream[place : place + step])
            place += step
            while (text := reader.next_frame()) is not None:
                found.append(text)
            assert reader.pending_bytes < HEADER_BYTES + STREAM_LIMIT_BYTES
    except VineyardProtocolError:
        assert damaged
    assert found[: len(intact)] == intact[: len(found)]
    if not damaged:
        assert found == texts
        assert reader.pending_bytes == 0


def check_many(seed, count):
    """Run *count* hostile texts through decoding and framing; return how often one was understood."""
    rng = random.Random(seed)
    understood, batch = 0, []
    for text in hostile_texts(seed, count):
        understood += check_text(text, rng)
        batch.append(text)
        if len(batch) == 20:
            check_stream(batch, rng)
            batch = []
    return understood
