"""Where a blob's bytes are: the nine fields that go with every blob, and ours.

``store_fd`` is the descriptor's number *in the daemon*: a name for a file of shared memory, never a descriptor of the
client. The file itself follows the reply that names it first on a connection (fds.py), and the reply says so: ``fd``
(one blob) or ``fds`` (several), each holding the numbers not sent before on this connection. The stock client
maps ``map_size - 8`` bytes from offset 0 and finds the blob at ``data_offset``; it refuses a reply whose ``fds`` are
not exactly the numbers that it has not mapped yet.
"""

from operator import itemgetter
from typing import Annotated, Any, NamedTuple

from kvferry.kvops.errors import VineyardProtocolError

from .fields import MAX_U64, Kind, Tree, check_list, refuse
from .ids import EMPTY_BLOB

MAP_GAP_BYTES = 8
"""``map_size`` says this much more than can be mapped: vineyardd's allocator keeps it between its regions."""

_MAX_BYTES = 1 << 62


class Payload(NamedTuple):
    """A blob's place in shared memory.

    A tuple and not a dataclass: a reply to a batch holds thousands.

    Attributes:
        object_id: the blob.
        store_fd: number of the file in the daemon; -1 for a blob of no bytes.
        data_offset: of the blob's first byte in the file.
        data_size: its bytes.
        map_size: bytes of the file, plus MAP_GAP_BYTES.
        pointer: address in the daemon; means nothing here, but the stock client wants a number.
        is_sealed: whether its writer has said that it is complete. Default False.
        is_owner: whether the daemon frees it. Default True.
        is_gpu: whether it is device memory; never, here. Default False.
        user_offset: bytes before the region that clients manage themselves; of a newer protocol. Default 0.
    """

    object_id: int
    store_fd: int
    data_offset: int
    data_size: int
    map_size: int
    pointer: int = 0
    is_sealed: bool = False
    is_owner: bool = True
    is_gpu: bool = False
    user_offset: int = 0


EMPTY_PAYLOAD = Payload(EMPTY_BLOB, -1, 0, 0, 0)
"""Of the blob of no bytes."""

_NUMBERS = (
    ("object_id", 0, MAX_U64),
    ("store_fd", -1, (1 << 31) - 1),
    ("data_offset", 0, _MAX_BYTES),
    ("data_size", 0, _MAX_BYTES),
    ("map_size", 0, _MAX_BYTES),
    ("pointer", 0, MAX_U64),
    ("user_offset", 0, _MAX_BYTES),
)
_PLACE = itemgetter("object_id", "store_fd", "data_offset", "data_size", "map_size", "pointer")
_payload = Payload._make


def check_payload(name: str, value: Any) -> Payload:
    """Return the payload in a JSON object whose fields fit each other.

    Raises:
        VineyardProtocolError: a field is missing or out of range, or the blob reaches past the end of its file.
    """
    try:
        object_id, store_fd, offset, size, map_size, pointer = _PLACE(value)
        get = value.get
        sealed, owner, gpu = get("is_sealed", False), get("is_owner", True), get("is_gpu", False)
        user_offset = get("user_offset", 0)
        # one test for what is nearly always so: a batch has thousands of these
        if (
            type(object_id) is type(store_fd) is type(offset) is type(size) is type(map_size) is int
            and type(pointer) is type(user_offset) is int
            and type(sealed) is type(owner) is type(gpu) is bool
            and 0 <= object_id <= MAX_U64
            and 0 <= pointer <= MAX_U64
            and -1 <= store_fd < 1 << 31
            and offset >= 0
            and size >= 0
            and 0 <= map_size <= _MAX_BYTES
            and (offset + size <= map_size - MAP_GAP_BYTES if store_fd >= 0 else not size)
            and 0 <= user_offset <= _MAX_BYTES
        ):
            place = (object_id, store_fd, offset, size, map_size, pointer)
            return _payload((*place, sealed, owner, gpu, user_offset))
    except (KeyError, TypeError):
        pass
    raise _whats_wrong(name, value)


def _whats_wrong(name: str, value: Any) -> VineyardProtocolError:
    if type(value) is not dict:
        return refuse(name, "an object", value)
    for field, low, high in _NUMBERS:
        number = value.get(field, 0 if field == "user_offset" else None)
        if type(number) is not int or not low <= number <= high:
            return refuse(f"{name}.{field}", f"a number from {low} to {high}", number)
    for field in ("is_sealed", "is_owner", "is_gpu"):
        if type(value.get(field, False)) is not bool:
            return refuse(f"{name}.{field}", "true or false", value[field])
    return VineyardProtocolError(
        f"{name} must lie inside its file; got {value['data_size']} bytes at {value['data_offset']}"
        f" of file {value['store_fd']}, map_size {value['map_size']}"
    )


def render_payload(payload: Payload) -> str:
    """Return the JSON text of a payload."""
    return (
        f'{{"object_id":{payload[0]},"store_fd":{payload[1]},"data_offset":{payload[2]},'
        f'"data_size":{payload[3]},"map_size":{payload[4]},"pointer":{payload[5]},'
        f'"is_sealed":{"true" if payload[6] else "false"},'
        f'"is_owner":{"true" if payload[7] else "false"},'
        f'"is_gpu":{"true" if payload[8] else "false"},"user_offset":{payload[9]}}}'
    )


def numbered(values: list[str]) -> str:
    """Return JSON members ``"0":...,"1":...`` for texts, the protocol's older way to write a list."""
    return ",".join([f'"{index}":{text}' for index, text in enumerate(values)])


def read_numbered(tree: Tree, count_field: str = "num") -> list[Any]:
    """Return the members ``"0"``, ``"1"``, ... of *tree*, as many as *count_field* says.

    Raises:
        VineyardProtocolError: one is missing, or the count is no number.
    """
    count = tree.get(count_field)
    # compared with what is there before anything of that size is made
    if type(count) is not int or not 0 <= count <= len(tree):
        raise refuse(count_field, 'the number of members "0", "1", ...', count)
    try:
        return check_list(count_field, [tree[str(index)] for index in range(count)])
    except KeyError as error:
        raise VineyardProtocolError(f"member {error} must be there; it is not") from None


def _check_payloads(name: str, value: Any) -> list[Payload]:
    return [check_payload(name, item) for item in check_list(name, value)]


def _render_payloads(payloads: list[Payload]) -> str:
    return f"[{','.join(map(render_payload, payloads))}]"


PayloadField = Annotated[Payload, Kind(check_payload, render_payload)]
Payloads = Annotated[list[Payload], Kind(_check_payloads, _render_payloads)]
