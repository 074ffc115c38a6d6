"""Requests and replies about blobs: bytes in shared memory, made, sealed, mapped, held and dropped.

Defaults are what the stock daemon and client assume when a field is missing. A descriptor travels after
``CreateBufferReply``, ``CreateBuffersReply``, ``GetBuffersReply`` and the stream's ``GetNextStreamChunkReply``, when
``fd`` is not -1 or ``fds`` is not empty.
"""

from typing import NamedTuple

from .codec import reply, request
from .fields import (
    DESCRIPTORS,
    OBJECT_IDS,
    Descriptor,
    Descriptors,
    Flag,
    ObjectId,
    ObjectIds,
    Size,
    Sizes,
    Tree,
    check_bool,
    check_list,
)
from .payload import (
    PayloadField,
    Payloads,
    check_payload,
    numbered,
    read_numbered,
    render_payload,
)


@reply("create_buffer_reply")
class CreateBufferReply(NamedTuple):
    """An unsealed blob.

    Attributes:
        id: of the blob.
        created: where it is.
        fd: ``created.store_fd`` if its descriptor follows, else -1.
    """

    id: ObjectId
    created: PayloadField
    fd: Descriptor = -1


@request("create_buffer_request", CreateBufferReply)
class CreateBufferRequest(NamedTuple):
    """Make a blob of *size* bytes, which hold whatever the memory held before."""

    size: Size


def _read_create_buffers_reply(tree: Tree) -> "CreateBuffersReply":
    payloads = tree.get("payloads")
    items = read_numbered(tree) if payloads is None else check_list("payloads", payloads)
    ids = OBJECT_IDS.check("ids", tree.get("ids"))
    if len(ids) != len(items):
        # a blob without a place, or the reverse, would be given to the wrong caller
        items = items[: len(ids)]
        ids = ids[: len(items)]
    return CreateBuffersReply(
        ids,
        [check_payload("payloads", item) for item in items],
        DESCRIPTORS.check("fds", tree.get("fds", [])),
    )


def _write_create_buffers_reply(message: "CreateBuffersReply") -> str:
    items = numbered([render_payload(payload) for payload in message.payloads])
    return (
        f'{{"type":"create_buffers_reply","num":{len(message.ids)},"ids":{OBJECT_IDS.render(message.ids)},'
        f'"fds":{DESCRIPTORS.render(message.fds)}{"," if items else ""}{items}}}'
    )


@reply("create_buffers_reply", read=_read_create_buffers_reply, write=_write_create_buffers_reply)
class CreateBuffersReply(NamedTuple):
    """Unsealed blobs, in the order of the sizes asked for.

    On the wire the payloads are members ``"0"``, ``"1"``, ... (the stock client reads nothing else) and ``num`` their
    count; vineyardd adds the same again as ``payloads``.

    Attributes:
        ids: of the blobs.
        payloads: where they are.
        fds: numbers whose descriptors follow, ascending. Default none.
    """

    ids: ObjectIds
    payloads: Payloads
    fds: Descriptors


@request("create_buffers_request", CreateBuffersReply)
class CreateBuffersRequest(NamedTuple):
    """Make a blob of each size, all or none. The stock client adds ``num``, which nobody reads."""

    sizes: Sizes


@reply("seal_reply")
class SealReply(NamedTuple):
    """Done."""


@request("seal_request", SealReply, repeatable=True)
class SealRequest(NamedTuple):
    """The blob is complete; it can be found from now on, and this connection holds it."""

    object_id: ObjectId


def _read_get_buffers_reply(tree: Tree) -> "GetBuffersReply":
    payloads = tree.get("payloads")
    items = read_numbered(tree) if payloads is None else check_list("payloads", payloads)
    return GetBuffersReply(
        [check_payload("payloads", item) for item in items],
        DESCRIPTORS.check("fds", tree.get("fds", [])),
        check_bool("compress", tree.get("compress", False)),
    )


def _write_get_buffers_reply(message: "GetBuffersReply") -> str:
    items = ",".join(map(render_payload, message.payloads))
    return (
        f'{{"type":"get_buffers_reply","num":{len(message.payloads)},"payloads":[{items}],'
        f'"fds":{DESCRIPTORS.render(message.fds)},"compress":{"true" if message.compress else "false"}}}'
    )


@reply("get_buffers_reply", read=_read_get_buffers_reply, write=_write_get_buffers_reply)
class GetBuffersReply(NamedTuple):
    """The blobs that exist; those that do not are left out, without an error.

    On the wire with ``num``; vineyardd writes the payloads twice, as ``payloads`` and as ``"0"``, ``"1"``, ...; the
    stock client reads the latter only when the former is missing.

    Attributes:
        payloads: where they are; match them by ``object_id``, not by place.
        fds: numbers whose descriptors follow, in the order of first use. Default none.
        compress: only for the network, always False here. Default False.
    """

    payloads: Payloads
    fds: Descriptors
    compress: Flag = False


def _read_get_buffers_request(tree: Tree) -> "GetBuffersRequest":
    ids = tree.get("ids")
    return GetBuffersRequest(
        OBJECT_IDS.check("ids", ids if type(ids) is list else read_numbered(tree)),
        check_bool("unsafe", tree.get("unsafe", False)),
    )


def _write_get_buffers_request(message: "GetBuffersRequest") -> str:
    return (
        f'{{"type":"get_buffers_request","num":{len(message.ids)},"ids":{OBJECT_IDS.render(message.ids)},'
        f'"unsafe":{"true" if message.unsafe else "false"}}}'
    )


@request(
    "get_buffers_request",
    GetBuffersReply,
    repeatable=True,
    read=_read_get_buffers_request,
    write=_write_get_buffers_request,
)
class GetBuffersRequest(NamedTuple):
    """Where are these blobs? This connection holds them from now on.

    On the wire either ``ids``, or, from the stock client, ``"0"``, ``"1"``, ... and ``num``, in no special order.

    Attributes:
        ids: of the blobs.
        unsafe: also give those that are not sealed; otherwise a single one makes the whole answer an error (14).
            Default False.
    """

    ids: ObjectIds
    unsafe: Flag = False


@reply("drop_buffer_reply")
class DropBufferReply(NamedTuple):
    """Done."""


@request("drop_buffer_request", DropBufferReply)
class DropBufferRequest(NamedTuple):
    """Give up a blob, sealed or not."""

    id: ObjectId


@reply("shrink_buffer_reply")
class ShrinkBufferReply(NamedTuple):
    """Done."""


@request("shrink_buffer_request", ShrinkBufferReply)
class ShrinkBufferRequest(NamedTuple):
    """Keep only the first *size* bytes of an unsealed blob."""

    id: ObjectId
    size: Size


@reply("increase_reference_count_reply")
class IncreaseReferenceCountReply(NamedTuple):
    """Done."""


@request("increase_reference_count_request", IncreaseReferenceCountReply, repeatable=True)
class IncreaseReferenceCountRequest(NamedTuple):
    """This connection holds these blobs (once each, however often it says so)."""

    ids: ObjectIds


@reply("release_reply")
class ReleaseReply(NamedTuple):
    """Done."""


@request("release_request", ReleaseReply, repeatable=True)
class ReleaseRequest(NamedTuple):
    """This connection no longer holds the blob; nothing happens if it did not."""

    object_id: ObjectId


@reply("evict_reply")
class EvictReply(NamedTuple):
    """Done. vineyardd 0.24.2 never sends it."""


@request("evict_request", EvictReply, repeatable=True)
class EvictRequest(NamedTuple):
    """Move blobs that nobody holds out of memory."""

    ids: ObjectIds


@reply("load_reply")
class LoadReply(NamedTuple):
    """Done. vineyardd 0.24.2 never sends it."""


@request("load_request", LoadReply, repeatable=True)
class LoadRequest(NamedTuple):
    """Bring blobs back into memory.

    Attributes:
        ids: of the blobs.
        pin: keep them there until unpinned. Default False.
    """

    ids: ObjectIds
    pin: Flag = False


@reply("unpin_reply")
class UnpinReply(NamedTuple):
    """Done. vineyardd 0.24.2 never sends it."""


@request("unpin_request", UnpinReply, repeatable=True)
class UnpinRequest(NamedTuple):
    """These blobs may leave memory again."""

    ids: ObjectIds


@reply("is_in_use_reply")
class IsInUseReply(NamedTuple):
    """Whether any connection holds the blob."""

    is_in_use: Flag


@request("is_in_use_request", IsInUseReply, repeatable=True)
class IsInUseRequest(NamedTuple):
    """Does any connection hold the blob?"""

    id: ObjectId


@reply("is_spilled_reply")
class IsSpilledReply(NamedTuple):
    """Whether the blob is out of memory."""

    is_spilled: Flag


@request("is_spilled_request", IsSpilledReply, repeatable=True)
class IsSpilledRequest(NamedTuple):
    """Is the blob out of memory?"""

    id: ObjectId
