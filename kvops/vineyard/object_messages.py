"""Requests and replies about objects: trees of metadata whose leaves are blobs, and their names.

A tree has ``typename`` and ``instance_id``, mostly ``nbytes``, ``transient`` (false once persisted) and ``global``; a
member is a tree of its own under its key. The daemon adds ``id`` (``"o%016x"``) and ``signature``. Lists and numbers
of the stock Python client's types are text inside: ``"shape_": "[3, 4]"``.
"""

from typing import NamedTuple

from .codec import reply, request
from .fields import (
    Flag,
    IdsByName,
    Metadata,
    MetadataById,
    Metadatas,
    ObjectId,
    ObjectIds,
    Size,
    Text,
    Texts,
)


@reply("create_data_reply")
class CreateDataReply(NamedTuple):
    """A new object.

    Attributes:
        id: of the object.
        signature: another number made for it, equal in all its copies.
        instance_id: of the daemon that holds it.
    """

    id: ObjectId
    signature: ObjectId
    instance_id: ObjectId


@request("create_data_request", CreateDataReply)
class CreateDataRequest(NamedTuple):
    """Make an object of this metadata; its blobs must exist (else 21), so must ``typename`` and ``instance_id``."""

    content: Metadata


@reply("create_datas_reply")
class CreateDatasReply(NamedTuple):
    """New objects, in the order asked for. vineyardd adds ``num``, which nobody reads."""

    ids: ObjectIds
    signatures: ObjectIds
    instance_ids: ObjectIds


@request("create_datas_request", CreateDatasReply)
class CreateDatasRequest(NamedTuple):
    """Make an object of each tree. The stock client adds ``num``, which nobody reads."""

    contents: Metadatas


@reply("get_data_reply")
class GetDataReply(NamedTuple):
    """Metadata by id; ids that do not exist are left out. On the wire ``null`` where nothing is left."""

    content: MetadataById


@request("get_data_request", GetDataReply, repeatable=True)
class GetDataRequest(NamedTuple):
    """The metadata of these objects and blobs.

    Attributes:
        id: of the objects or blobs; a list, for all its name.
        sync_remote: ask the cluster first. Default False.
        wait: answer when they exist. Default False.
    """

    id: ObjectIds
    sync_remote: Flag = False
    wait: Flag = False


@request("list_data_request", GetDataReply, repeatable=True)
class ListDataRequest(NamedTuple):
    """The metadata of objects whose *type name* matches; answered as ``get_data_request`` is.

    Attributes:
        pattern: of the type name, a shell pattern.
        regex: the pattern is a regular expression. Default False.
        limit: at most so many.
    """

    pattern: Text
    regex: Flag = False
    limit: Size = 5


@reply("del_data_reply")
class DelDataReply(NamedTuple):
    """Done."""


@request("del_data_request", DelDataReply)
class DelDataRequest(NamedTuple):
    """Delete objects or blobs.

    Attributes:
        id: of the objects or blobs; a list, for all its name.
        force: even if other objects have them as members. Default False.
        deep: their members too, where no other object has them; blobs directly in them go in any case. Default False;
            the stock client says True.
        fastpath: for blobs only (else 7): do not look for objects that have them. Default False.
        memory_trim: give the memory back to the system. Default False.
    """

    id: ObjectIds
    force: Flag = False
    deep: Flag = False
    fastpath: Flag = False
    memory_trim: Flag = False


@reply("del_data_with_feedbacks_reply")
class DelDataWithFeedbacksReply(NamedTuple):
    """The blobs that went."""

    deleted_bids: ObjectIds


@request("del_data_with_feedbacks_request", DelDataWithFeedbacksReply)
class DelDataWithFeedbacksRequest(NamedTuple):
    """Delete like ``del_data_request``, and say which blobs went."""

    id: ObjectIds
    force: Flag = False
    deep: Flag = False
    fastpath: Flag = False
    memory_trim: Flag = False


@reply("exists_reply")
class ExistsReply(NamedTuple):
    """Whether the object or blob is there. Default False."""

    exists: Flag = False


@request("exists_request", ExistsReply, repeatable=True)
class ExistsRequest(NamedTuple):
    """Is the object or blob there?"""

    id: ObjectId


@reply("persist_reply")
class PersistReply(NamedTuple):
    """Done."""


@request("persist_request", PersistReply, repeatable=True)
class PersistRequest(NamedTuple):
    """Show the object to every connection of the cluster; only then can it have a name."""

    id: ObjectId


@reply("if_persist_reply")
class IfPersistReply(NamedTuple):
    """Whether the object is persisted. Default False."""

    persist: Flag = False


@request("if_persist_request", IfPersistReply, repeatable=True)
class IfPersistRequest(NamedTuple):
    """Is the object persisted?"""

    id: ObjectId


@reply("label_reply")
class LabelReply(NamedTuple):
    """Done."""


@request("label_request", LabelReply, repeatable=True)
class LabelRequest(NamedTuple):
    """Put labels on an object: texts by key, two lists of one length."""

    id: ObjectId
    keys: Texts
    values: Texts


@reply("shallow_copy_reply")
class ShallowCopyReply(NamedTuple):
    """The copy's id."""

    target_id: ObjectId


@request("shallow_copy_request", ShallowCopyReply)
class ShallowCopyRequest(NamedTuple):
    """Make an object with the same members, and more metadata.

    Attributes:
        id: of the object.
        extra: members to add or replace. Default none.
    """

    id: ObjectId
    # a fresh mapping each time is not needed: messages are never changed
    extra: Metadata = {}  # noqa: RUF012


@reply("put_name_reply")
class PutNameReply(NamedTuple):
    """Done."""


@request("put_name_request", PutNameReply, repeatable=True)
class PutNameRequest(NamedTuple):
    """Give a persisted object a name. vineyardd moves the name silently if another object had it.

    Attributes:
        object_id: of the object; a blob cannot have a name (1), nor can a transient object.
        name: any text.
        overwrite: False refuses (11) a name that is taken; of a newer protocol, 0.24.2 ignores it. Default True.
    """

    object_id: ObjectId
    name: Text
    overwrite: Flag = True


@reply("get_name_reply")
class GetNameReply(NamedTuple):
    """The object's id; it may have been deleted meanwhile."""

    object_id: ObjectId


@request("get_name_request", GetNameReply, repeatable=True)
class GetNameRequest(NamedTuple):
    """Which object has the name? None is an error (12).

    Attributes:
        name: the text.
        wait: answer when there is one. Required by vineyardd; default False.
    """

    name: Text
    wait: Flag = False


@reply("list_name_reply")
class ListNameReply(NamedTuple):
    """Ids by name. vineyardd adds ``size``, which nobody reads."""

    # as the stock client does without the member
    names: IdsByName = {}  # noqa: RUF012


@request("list_name_request", ListNameReply, repeatable=True)
class ListNameRequest(NamedTuple):
    """Names that match.

    Attributes:
        pattern: of the name, a shell pattern.
        regex: the pattern is a regular expression. Default False.
        limit: at most so many.
    """

    pattern: Text
    regex: Flag = False
    limit: Size = 5


@reply("drop_name_reply")
class DropNameReply(NamedTuple):
    """Done, or there was none."""


@request("drop_name_request", DropNameReply, repeatable=True)
class DropNameRequest(NamedTuple):
    """Forget a name; the object stays."""

    name: Text
