"""Status codes of the vineyard protocol, and the error a code becomes."""

from enum import IntEnum

from kvferry.kvops.errors import VineyardStatusError


class Status(IntEnum):
    """The number in ``{"code": N, "message": "..."}``, the reply to a request that failed."""

    OK = 0
    INVALID = 1
    KEY_ERROR = 2
    TYPE_ERROR = 3
    IO_ERROR = 4
    END_OF_FILE = 5
    NOT_IMPLEMENTED = 6
    ASSERTION_FAILED = 7
    USER_INPUT_ERROR = 8
    OBJECT_EXISTS = 11
    OBJECT_NOT_EXISTS = 12
    OBJECT_SEALED = 13
    OBJECT_NOT_SEALED = 14
    OBJECT_IS_BLOB = 15
    OBJECT_TYPE_ERROR = 16
    OBJECT_SPILLED = 17
    OBJECT_NOT_SPILLED = 18
    META_TREE_INVALID = 21
    META_TREE_TYPE_INVALID = 22
    META_TREE_TYPE_NOT_EXISTS = 23
    META_TREE_NAME_INVALID = 24
    META_TREE_NAME_NOT_EXISTS = 25
    META_TREE_LINK_INVALID = 26
    META_TREE_SUBTREE_NOT_EXISTS = 27
    SERVER_NOT_READY = 31
    ARROW_ERROR = 32
    CONNECTION_FAILED = 33
    CONNECTION_ERROR = 34
    ETCD_ERROR = 35
    ALREADY_STOPPED = 36
    REDIS_ERROR = 37
    NOT_ENOUGH_MEMORY = 41
    STREAM_DRAINED = 42
    STREAM_FAILED = 43
    INVALID_STREAM_STATE = 44
    STREAM_OPENED = 45
    GLOBAL_OBJECT_INVALID = 51
    UNKNOWN_ERROR = 255


def status_error(status: Status, reason: str) -> VineyardStatusError:
    """Return the error that a server raises to have *status* and *reason* sent to its client."""
    return VineyardStatusError(int(status), reason)
