"""A client's connection as a service: made when needed, made again when lost, shared by threads, safe across forks."""

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from kvferry.kvops.errors import (
    VineyardConnectionError,
    VineyardProtocolError,
    VineyardStatusError,
)

from .codec import CODECS, Message
from .connection import Connection, payloads_of
from .daemon_messages import RegisterReply
from .fds import Mappings

DEFAULT_TIMEOUT_S = 10.0

_Reply = TypeVar("_Reply")


class Session:
    """Carries requests to one daemon and replies back.

    A call that finds the daemon gone before anything was sent connects again by itself. One that loses it midway does
    so too if all its requests may be carried out twice; otherwise it raises, since nobody knows what was done, and the
    next call connects.

    Args:
        path: of the daemon's socket.
        timeout_s: of a call, connecting included; each call may say otherwise.
        username: for a daemon that keeps a list of users.
        password: the same.

    Attributes:
        path: as given.
        connects: how many connections were made. When it has grown, what the old one held is released, its unsealed
            blobs may be gone, and the daemon may be another one.
        round_trips: how many calls were carried out, of how many requests ever.

    Threads: any number; calls wait for each other. Ownership: the connection and the mappings.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        username: str = "",
        password: str = "",
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be a positive number of seconds; got {timeout_s!r}")
        self.path = os.fspath(path)
        self.timeout_s = timeout_s
        self.connects = 0
        self.round_trips = 0
        self._user = (username, password)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._mappings = Mappings()
        self._is_closed = False
        _SESSIONS.add(self)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection that has not failed yet."""
        return self._connection is not None

    def connect(self, timeout_s: float | None = None) -> RegisterReply:
        """Connect if there is no connection, and return what the daemon says of itself.

        Raises:
            VineyardError: as :meth:`call`.
        """
        with self._lock:
            return self._connected(self.timeout_s if timeout_s is None else timeout_s).registered

    def call(
        self, request: Message, expected: type[_Reply], timeout_s: float | None = None
    ) -> _Reply:
        """Carry out one request and return its reply.

        Args:
            request: any that has a reply.
            expected: class of the reply.
            timeout_s: for this call, instead of the session's.

        Raises:
            VineyardStatusError: the daemon refused.
            VineyardConnectionError: nobody listens, or the daemon went away midway.
            VineyardTimeoutError: no reply in time; the request may or may not be carried out.
            VineyardProtocolError: the reply makes no sense.
        """
        reply = self.batch([request], timeout_s)[0]
        if isinstance(reply, VineyardStatusError):
            raise reply
        return cast(_Reply, reply)

    def batch(
        self, requests: Sequence[Message], timeout_s: float | None = None
    ) -> list[Message | VineyardStatusError]:
        """Carry out *requests* without waiting for one reply before the next is sent.

        Args:
            requests: any that have replies.
            timeout_s: for all of them together, instead of the session's.

        Returns:
            The replies in the order of the requests; a refused one is an error in its place, and the others are
            carried out all the same.

        Raises:
            VineyardError: as :meth:`call`, but for refusals.
        """
        if not requests:
            return []
        with self._lock:
            return self._carry_out(requests, timeout_s)

    def call_all(self, requests: Sequence[Message], timeout_s: float | None = None) -> list[Any]:
        """Carry out *requests* like :meth:`batch`, and raise the first refusal when all are through."""
        replies = self.batch(requests, timeout_s)
        for reply in replies:
            if isinstance(reply, VineyardStatusError):
                raise reply
        return replies

    def fetch(
        self, requests: Sequence[Message], timeout_s: float | None = None
    ) -> list[tuple[Message | VineyardStatusError, list[memoryview]]]:
        """Carry out *requests* like :meth:`batch`, and give with each reply the bytes of the blobs it tells of.

        Raises:
            VineyardError: as :meth:`batch`, or the memory of a blob was never sent.
        """
        if not requests:
            return []
        # one lock for both: a reconnect in between would give the numbers of files another meaning
        with self._lock:
            replies = self._carry_out(requests, timeout_s)
            view = self._mappings.view
            try:
                return [(reply, [view(one) for one in payloads_of(reply)]) for reply in replies]
            except VineyardProtocolError:
                self._drop()
                raise

    def close(self) -> None:
        """Close the connection and unmap what no view uses; later calls raise. Again is harmless."""
        with self._lock:
            self._is_closed = True
            self._drop(say_goodbye=True)

    def _carry_out(
        self, requests: Sequence[Message], timeout_s: float | None
    ) -> list[Message | VineyardStatusError]:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        is_fresh = self._connection is None
        connection = self._connected(limit_s)
        try:
            # a connection that is there took no time: the same limit as last time costs no system call
            replies = self._exchange(connection, requests, _left(deadline) if is_fresh else limit_s)
        except VineyardConnectionError:
            is_repeatable = all(CODECS[type(request)].repeatable for request in requests)
            if is_fresh or (connection.has_sent and not is_repeatable):
                raise
            connection = self._connected(_left(deadline))
            replies = self._exchange(connection, requests, _left(deadline))
        self.round_trips += 1
        return replies

    def _exchange(
        self, connection: Connection, requests: Sequence[Message], timeout_s: float
    ) -> list[Message | VineyardStatusError]:
        try:
            return connection.exchange(requests, timeout_s)
        finally:
            # replies of an exchange that was broken off, by whatever, would be taken for those of the next
            if not connection.is_settled:
                self._drop()

    def _connected(self, timeout_s: float) -> Connection:
        if self._is_closed:
            raise VineyardConnectionError(f"this client of {self.path} is closed")
        if self._connection is not None and not self._connection.is_mine:
            self._drop()
        if self._connection is None:
            self._connection = Connection(self.path, self._mappings, timeout_s, *self._user)
            self.connects += 1
        return self._connection

    def _drop(self, *, say_goodbye: bool = False) -> None:
        if self._connection is not None:
            self._connection.close(say_goodbye=say_goodbye)
            self._connection = None
            self._mappings.close()

    def _after_fork_in_child(self) -> None:
        # another thread of the parent may have held it, and will never release this copy
        self._lock = threading.Lock()
        self._drop()


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


_SESSIONS: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _renew_sessions() -> None:
    for session in list(_SESSIONS):
        session._after_fork_in_child()


os.register_at_fork(after_in_child=_renew_sessions)
