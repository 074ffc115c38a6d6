"""What a field of a message may hold: its check when it comes in, its text when it goes out.

A message declares its fields with the types below (``object_id: ObjectId``); codec.py reads them. Checks are strict,
since what passes is used as a size, an offset or a key: a bool is no number, a number is no float, text is UTF-8.
"""

import json
import math
from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Annotated, Any, NamedTuple

from kvferry.kvops.errors import VineyardProtocolError

from .ids import format_id, parse_id

MAX_ITEMS = 1 << 18
"""Longest list in a message: ids, sizes, trees, names."""

MAX_TEXT_CHARS = 1 << 16
"""Longest name, pattern, path, label or key."""

MAX_DEPTH = 64
"""Deepest nesting of metadata; a DataFrame of tensors has six levels."""

MAX_U64 = (1 << 64) - 1

Tree = dict[str, Any]


class Kind(NamedTuple):
    """How one type of field is read and written.

    ``check(name, value)`` returns the value to keep, or raises; ``render(value)`` returns its JSON text.
    """

    check: Callable[[str, Any], Any]
    render: Callable[[Any], str]


def refuse(name: str, expected: str, value: object) -> VineyardProtocolError:
    """Return the error for a field that holds the wrong thing."""
    return VineyardProtocolError(f"{name} must be {expected}; got {_shown(value)}")


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of over 128 bits"
    return f"{value!r:.60}"


def _integer(low: int, high: int, expected: str) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if type(value) is int and low <= value <= high:
            return value
        raise refuse(name, expected, value)

    return check


def check_bool(name: str, value: Any) -> bool:
    """Return *value* if it is a bool."""
    if type(value) is bool:
        return value
    raise refuse(name, "true or false", value)


def check_text(name: str, value: Any) -> str:
    """Return *value* if it is text that UTF-8 can hold and not too long."""
    if type(value) is not str:
        raise refuse(name, "text", value)
    if len(value) > MAX_TEXT_CHARS:
        raise refuse(name, f"at most {MAX_TEXT_CHARS} characters", f"{value[:20]}...")
    return value


def check_list(name: str, value: Any) -> list[Any]:
    """Return *value* if it is a list of at most MAX_ITEMS things."""
    if type(value) is not list:
        raise refuse(name, "a list", value)
    if len(value) > MAX_ITEMS:
        raise refuse(name, f"a list of at most {MAX_ITEMS} items", value)
    return value


def _list_of(one: Callable[[str, Any], Any]) -> Callable[[str, Any], list[Any]]:
    def check(name: str, value: Any) -> list[Any]:
        return [one(name, item) for item in check_list(name, value)]

    return check


def _integers(low: int, high: int, expected: str) -> Callable[[str, Any], list[int]]:
    def check(name: str, value: Any) -> list[int]:
        for item in check_list(name, value):
            if type(item) is not int or not low <= item <= high:
                raise refuse(name, f"a list whose items are {expected}", item)
        return list(value)

    return check


def check_json(name: str, value: Any) -> Any:
    """Return *value* if it nests no deeper than MAX_DEPTH."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if type(item) is dict:
                below += item.values()
            elif type(item) is list:
                below += item
        if not below:
            return value
        level = [item for item in below if type(item) is dict or type(item) is list]
    raise VineyardProtocolError(f"{name} must nest at most {MAX_DEPTH} levels deep; it does more")


def check_tree(name: str, value: Any) -> Tree:
    """Return *value* if it is an object of metadata."""
    if type(value) is not dict:
        raise refuse(name, "an object", value)
    check_json(name, value)
    return value


def _check_trees_by_id(name: str, value: Any) -> dict[int, Tree]:
    # the daemon says null where nothing was found
    if value is None:
        return {}
    if type(value) is not dict or len(value) > MAX_ITEMS:
        raise refuse(name, f"null or an object of at most {MAX_ITEMS} ids", value)
    return {parse_id(key): check_tree(name, tree) for key, tree in value.items()}


def _check_ids_by_name(name: str, value: Any) -> dict[str, int]:
    # a daemon that serialises an empty map as null is understood too
    if value is None:
        return {}
    if type(value) is not dict or len(value) > MAX_ITEMS:
        raise refuse(name, f"an object of at most {MAX_ITEMS} names", value)
    return {check_text(name, key): OBJECT_ID.check(name, item) for key, item in value.items()}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is too large")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def parse_object(text: bytes) -> Tree:
    """Return the JSON object written in *text*.

    Raises:
        VineyardProtocolError: not UTF-8, not JSON, nested too deep, or not an object.
    """
    try:
        tree = _DECODER.decode(text.decode())
        # half of a surrogate pair passes as an escape and could never be sent on
        if b"\\ud" in text or b"\\uD" in text:
            json.dumps(tree, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise VineyardProtocolError(f"a message must be JSON; {error!s:.120}") from None
    if type(tree) is not dict:
        raise refuse("a message", "an object", tree)
    return tree


def render_json(value: Any) -> str:
    """Return *value* as JSON text.

    Raises:
        VineyardProtocolError: it holds something that JSON has no form for.
    """
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise VineyardProtocolError(f"metadata must be JSON; {error!s:.120}") from None


def _render_bool(value: bool) -> str:
    return "true" if value else "false"


def _render_integers(values: list[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def _render_trees_by_id(trees: dict[int, Tree]) -> str:
    if not trees:
        return "null"
    return render_json({format_id(object_id): tree for object_id, tree in trees.items()})


OBJECT_ID = Kind(_integer(0, MAX_U64, "a number of 64 bits"), str)
OBJECT_IDS = Kind(_integers(0, MAX_U64, "numbers of 64 bits"), _render_integers)
DESCRIPTORS = Kind(_integers(0, (1 << 31) - 1, "descriptor numbers"), _render_integers)
_size = _integer(0, (1 << 63) - 1, "a number of bytes, 0 to 2**63 - 1")
_sizes = _integers(0, (1 << 63) - 1, "numbers of bytes, 0 to 2**63 - 1")
_i32 = _integer(-1, (1 << 31) - 1, "-1 or a descriptor's number")

ObjectId = Annotated[int, OBJECT_ID]
"""An id, a signature or an instance: 64 bits, no sign."""
ObjectIds = Annotated[list[int], OBJECT_IDS]
Size = Annotated[int, Kind(_size, str)]
Sizes = Annotated[list[int], Kind(_sizes, _render_integers)]
Number = Annotated[int, Kind(_integer(-(1 << 63), (1 << 63) - 1, "a number of 64 bits"), str)]
Descriptor = Annotated[int, Kind(_i32, str)]
"""A descriptor's number in the daemon, a name for its file; -1 for none."""
Descriptors = Annotated[list[int], DESCRIPTORS]
Flag = Annotated[bool, Kind(check_bool, _render_bool)]
Text = Annotated[str, Kind(check_text, encode_basestring_ascii)]
Texts = Annotated[list[str], Kind(_list_of(check_text), render_json)]
Metadata = Annotated[Tree, Kind(check_tree, render_json)]
"""An object's metadata: a JSON object, at most MAX_DEPTH levels."""
Metadatas = Annotated[list[Tree], Kind(_list_of(check_tree), render_json)]
MetadataById = Annotated[dict[int, Tree], Kind(_check_trees_by_id, _render_trees_by_id)]
IdsByName = Annotated[dict[str, int], Kind(_check_ids_by_name, render_json)]
Json = Annotated[Any, Kind(check_json, render_json)]
