"""Requests and replies about the connection and the daemon itself."""

from typing import Annotated, Any, NamedTuple

from .codec import reply, request
from .fields import (
    Flag,
    Json,
    Kind,
    Metadata,
    Number,
    ObjectId,
    Text,
    check_text,
    refuse,
    render_json,
)

CLIENT_VERSION = "0.24.2"
"""The protocol spoken here; neither vineyardd nor its client enforces it."""

NORMAL_STORE = 1
"""``store_type`` of a daemon with blobs, the only kind here; 2 was Plasma."""


def _check_store_type(name: str, value: Any) -> int | str:
    if type(value) is int and 0 <= value < 1 << 31:
        return value
    if type(value) is str:
        return check_text(name, value)
    raise refuse(name, "a number or a name", value)


@reply("register_reply")
class RegisterReply(NamedTuple):
    """Welcome.

    Attributes:
        ipc_socket: path of the daemon's socket; may be empty.
        rpc_endpoint: its address in the network; may be empty.
        instance_id: which daemon of a cluster it is; 0 for a local one.
        session_id: the session joined.
        version: the daemon's. Default 0.0.0.
        store_match: whether it has the kind of store asked for; the stock client leaves if not. Default True.
        support_rpc_compression: only for the network. Default False.
    """

    ipc_socket: Text
    rpc_endpoint: Text
    instance_id: ObjectId
    session_id: Number
    version: Text = "0.0.0"
    store_match: Flag = True
    support_rpc_compression: Flag = False


@request("register_request", RegisterReply, repeatable=True)
class RegisterRequest(NamedTuple):
    """The first request of every connection; any other before it is refused.

    Attributes:
        version: the client's. Default 0.0.0.
        store_type: 1, or ``"Normal"``, for blobs. Default 1.
        session_id: the session to join; 0 is the common one. Default 0.
        username: checked only where the daemon keeps a list of users. Default empty.
        password: the same.
    """

    version: Text = "0.0.0"
    store_type: Annotated[int | str, Kind(_check_store_type, render_json)] = NORMAL_STORE
    session_id: Number = 0
    username: Text = ""
    password: Text = ""


@request("exit_request", None)
class ExitRequest(NamedTuple):
    """Good-bye. No reply: the daemon closes the connection."""


@reply("clear_reply")
class ClearReply(NamedTuple):
    """Done."""


@request("clear_request", ClearReply, repeatable=True)
class ClearRequest(NamedTuple):
    """Delete every object and every blob."""


@reply("memory_trim_reply")
class MemoryTrimReply(NamedTuple):
    """Whether memory went back to the system. Default False."""

    trimmed: Flag = False


@request("memory_trim_request", MemoryTrimReply, repeatable=True)
class MemoryTrimRequest(NamedTuple):
    """Give free memory back to the system."""


@reply("debug_reply")
class DebugReply(NamedTuple):
    """Anything; null in a release build."""

    result: Json


@request("debug_command", DebugReply, repeatable=True)
class DebugRequest(NamedTuple):
    """For the daemon's developers."""

    debug: Json


@reply("cluster_meta")
class ClusterMetaReply(NamedTuple):
    """The daemons of the cluster: ``{"i0": {"hostid", "hostname", "ipc_socket", "nodename", "rpc_endpoint", ...}}``."""

    meta: Metadata


@request("cluster_meta", ClusterMetaReply, repeatable=True)
class ClusterMetaRequest(NamedTuple):
    """Who is in the cluster? Request and reply have the same wire name."""


@reply("instance_status_reply")
class InstanceStatusReply(NamedTuple):
    """The daemon in numbers.

    ``{"instance_id", "deployment": "local", "memory_usage", "memory_limit", "deferred_requests", "ipc_connections",
    "rpc_connections"}``; memory in bytes.
    """

    meta: Metadata


@request("instance_status_request", InstanceStatusReply, repeatable=True)
class InstanceStatusRequest(NamedTuple):
    """How full is it, and how many are connected?"""


@reply("migrate_object_reply")
class MigrateObjectReply(NamedTuple):
    """The local copy's id."""

    object_id: ObjectId


@request("migrate_object_request", MigrateObjectReply)
class MigrateObjectRequest(NamedTuple):
    """Fetch an object from another daemon of the cluster; a local daemon has none to ask."""

    object_id: ObjectId
