"""The client's verbs for objects and their names."""

from collections.abc import Mapping, Sequence

from kvferry.kvops.errors import VineyardStatusError

from . import object_messages as messages
from .fields import Tree
from .session import Session
from .status import Status

LIST_LIMIT = 1 << 16
"""Matches asked for unless told otherwise; the stock client's 5 hides most of a store."""


class Objects:
    """Objects of one daemon: trees of metadata whose leaves are blobs.

    A tree to be made needs ``typename``; ``instance_id``, ``nbytes``, ``transient`` and ``global`` are filled in where
    they are missing. A member is a tree with at least ``id``, as :meth:`get` returns it. Errors as in :class:`Client`.

    Threads: as the session's.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def create(self, tree: Tree) -> int:
        """Make an object of *tree* and return its id.

        Raises:
            VineyardStatusError: 21 or 7, something it needs is missing, or a blob in it does not exist.
        """
        request = messages.CreateDataRequest(self._filled(tree))
        return self._session.call(request, messages.CreateDataReply).id

    def create_many(self, trees: Sequence[Tree]) -> list[int]:
        """Make an object of each tree, in one message, and return their ids."""
        request = messages.CreateDatasRequest([self._filled(tree) for tree in trees])
        return self._session.call(request, messages.CreateDatasReply).ids

    def get(self, object_id: int) -> Tree | None:
        """Return the metadata of an object or a blob, None if there is none."""
        return self.get_many([object_id])[0]

    def get_many(self, object_ids: Sequence[int], *, wait: bool = False) -> list[Tree | None]:
        """Return metadata in the order of the ids, None for those that do not exist.

        Members that are blobs say ``length`` 0; their size is what ``get_blobs`` finds.

        Args:
            object_ids: of objects or blobs; repeated ones are fine.
            wait: until they exist, within the time limit.
        """
        request = messages.GetDataRequest(list(dict.fromkeys(object_ids)), wait=wait)
        found = self._session.call(request, messages.GetDataReply).content
        return [found.get(object_id) for object_id in object_ids]

    def find(
        self, pattern: str = "*", *, regex: bool = False, limit: int = LIST_LIMIT
    ) -> dict[int, Tree]:
        """Return metadata by id of objects whose *type name* matches a shell pattern or a regular expression."""
        request = messages.ListDataRequest(pattern, regex, limit)
        return self._session.call(request, messages.GetDataReply).content

    def exist(self, object_ids: Sequence[int]) -> list[bool]:
        """Return for each id whether there is such an object or blob."""
        requests = [messages.ExistsRequest(object_id) for object_id in object_ids]
        return [reply.exists for reply in self._session.call_all(requests)]

    def persist(self, object_ids: Sequence[int]) -> None:
        """Show objects to all of the cluster; only then can they have names."""
        self._session.call_all([messages.PersistRequest(object_id) for object_id in object_ids])

    def is_persistent(self, object_id: int) -> bool:
        """Whether the object is persisted."""
        request = messages.IfPersistRequest(object_id)
        return self._session.call(request, messages.IfPersistReply).persist

    def label(self, object_id: int, labels: Mapping[str, str]) -> None:
        """Put labels on an object, replacing those of the same keys."""
        request = messages.LabelRequest(object_id, [*labels], [*labels.values()])
        self._session.call(request, messages.LabelReply)

    def copy(self, object_id: int, extra: Tree | None = None) -> int:
        """Return the id of a new object with the same members, and *extra* metadata."""
        request = messages.ShallowCopyRequest(object_id, extra or {})
        return self._session.call(request, messages.ShallowCopyReply).target_id

    def delete(
        self,
        object_ids: Sequence[int],
        *,
        force: bool = False,
        deep: bool = True,
        fastpath: bool = False,
        memory_trim: bool = False,
    ) -> None:
        """Delete objects or blobs.

        Args:
            object_ids: which.
            force: even if other objects have them as members.
            deep: their members too, where no other object has them; blobs directly in them go in any case.
            fastpath: for blobs only: do not look for objects that have them.
            memory_trim: give the memory back to the system.
        """
        request = messages.DelDataRequest(list(object_ids), force, deep, fastpath, memory_trim)
        self._session.call(request, messages.DelDataReply)

    def delete_and_tell(
        self, object_ids: Sequence[int], *, force: bool = False, deep: bool = True
    ) -> list[int]:
        """Delete as :meth:`delete` and return the ids of the blobs that went."""
        request = messages.DelDataWithFeedbacksRequest(list(object_ids), force, deep)
        return self._session.call(request, messages.DelDataWithFeedbacksReply).deleted_bids

    def _filled(self, tree: Tree) -> Tree:
        instance = self._session.connect().instance_id
        defaults = {"instance_id": instance, "nbytes": 0, "transient": True, "global": False}
        return {**defaults, **tree}


class Names:
    """Names of persisted objects. A name outlives its object; errors as in :class:`Client`.

    Threads: as the session's.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def put(self, name: str, object_id: int, *, overwrite: bool = True) -> None:
        """Give a persisted object a name.

        Args:
            name: any text.
            object_id: of the object.
            overwrite: False refuses (11) a name that is taken; vineyardd 0.24.2 does not know it and overwrites.
        """
        request = messages.PutNameRequest(object_id, name, overwrite)
        self._session.call(request, messages.PutNameReply)

    def put_many(self, object_ids: Mapping[str, int], *, overwrite: bool = True) -> None:
        """Give objects names, as :meth:`put`, without waiting for one before the next."""
        self._session.call_all(
            [
                messages.PutNameRequest(object_id, name, overwrite)
                for name, object_id in object_ids.items()
            ]
        )

    def get(self, name: str, *, wait: bool = False, timeout_s: float | None = None) -> int | None:
        """Return the id of the object with the name, None if there is none.

        Args:
            name: the text.
            wait: until there is one, within the time limit.
            timeout_s: for this call.
        """
        request = messages.GetNameRequest(name, wait)
        try:
            return self._session.call(request, messages.GetNameReply, timeout_s).object_id
        except VineyardStatusError as refusal:
            if refusal.code == Status.OBJECT_NOT_EXISTS:
                return None
            raise

    def get_many(self, names: Sequence[str]) -> list[int | None]:
        """Return ids in the order of the names, None where there is none."""
        replies = self._session.batch([messages.GetNameRequest(name) for name in names])
        ids: list[int | None] = []
        for reply in replies:
            if isinstance(reply, messages.GetNameReply):
                ids.append(reply.object_id)
            elif isinstance(reply, VineyardStatusError) and reply.code != Status.OBJECT_NOT_EXISTS:
                raise reply
            else:
                ids.append(None)
        return ids

    def find(
        self, pattern: str = "*", *, regex: bool = False, limit: int = LIST_LIMIT
    ) -> dict[str, int]:
        """Return ids by name, of names that match a shell pattern or a regular expression."""
        request = messages.ListNameRequest(pattern, regex, limit)
        return self._session.call(request, messages.ListNameReply).names

    def drop(self, names: Sequence[str]) -> None:
        """Forget names; the objects stay, and names that do not exist are no error."""
        self._session.call_all([messages.DropNameRequest(name) for name in names])
