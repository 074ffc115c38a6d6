"""The faults that an engine can be told to have: what each applies to, and what it does there.

Nineteen of them are the switches that an earlier design for this kind of store had for its tests, eleven for the
asynchronous calls and eight for what lies above them; the others are what disks and kernels do.
"""

import dataclasses
import enum
import errno as numbers
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Effect(enum.Enum):
    """What a fault does to a call or a request."""

    REFUSE = "fails before a byte moves"
    SPOIL = "is done, and reported as failed"
    HOLD = "reaches the engine only when released"
    WITHHOLD = "is done, and comes back only when released"
    LIMIT = "takes no more than `limit` requests"
    IDLE = "returns nothing"
    SHORT = "moves half of the bytes, in whole pages"
    FLIP = "gets one bit wrong, and says nothing"
    DELAY = "comes back `seconds` later, by the clock"


@dataclasses.dataclass(frozen=True, slots=True)
class Switch:
    """What a fault applies to: kinds of calls, see :class:`Call`; its effect, and its error number unless given."""

    effect: Effect
    kinds: tuple[str, ...]
    errno: int = 0


_FILE_CALLS = ("open", "allocate", "truncate", "sync", "sync_folder", "rename", "unlink")
_READS, _WRITES = ("read", "read_now"), ("write", "write_now")

TABLE: dict[str, Switch] = {
    # eleven of an asynchronous engine; set-up is seen by whoever opens files on it
    "aio_setup_error": Switch(Effect.REFUSE, ("open", "submit"), numbers.EAGAIN),
    "aio_submit_error": Switch(Effect.REFUSE, ("submit",), numbers.EAGAIN),
    "aio_submit_timeout": Switch(Effect.HOLD, ("submit",)),
    "aio_submit_partial": Switch(Effect.LIMIT, ("submit",)),
    "aio_getevents_error": Switch(Effect.REFUSE, ("reap",), numbers.EIO),
    "aio_getevents_timeout": Switch(Effect.WITHHOLD, ("reap",)),
    "aio_getevents_no_events": Switch(Effect.IDLE, ("reap",)),
    "aio_read_error": Switch(Effect.SPOIL, ("read",), numbers.EIO),
    "aio_write_error": Switch(Effect.SPOIL, ("write",), numbers.EIO),
    "aio_read_timeout": Switch(Effect.WITHHOLD, ("read",)),
    "aio_write_timeout": Switch(Effect.WITHHOLD, ("write",)),
    # eight of what lies above it; a call that cannot be held (read_now, write_now) fails with ETIMEDOUT
    "read_error": Switch(Effect.REFUSE, _READS, numbers.EIO),
    "write_error": Switch(Effect.REFUSE, _WRITES, numbers.EIO),
    "read_timeout": Switch(Effect.HOLD, _READS, numbers.ETIMEDOUT),
    "write_timeout": Switch(Effect.HOLD, _WRITES, numbers.ETIMEDOUT),
    "batch_read_error": Switch(Effect.REFUSE, ("batch_read",), numbers.EIO),
    "batch_write_error": Switch(Effect.REFUSE, ("batch_write",), numbers.EIO),
    "batch_read_timeout": Switch(Effect.HOLD, ("batch_read",)),
    "batch_write_timeout": Switch(Effect.HOLD, ("batch_write",)),
    # and what disks do
    "short_read": Switch(Effect.SHORT, ("read",)),
    "short_write": Switch(Effect.SHORT, ("write",)),
    "bit_flip_read": Switch(Effect.FLIP, _READS),
    "bit_flip_write": Switch(Effect.FLIP, _WRITES),
    "no_space": Switch(Effect.REFUSE, (*_WRITES, "allocate"), numbers.ENOSPC),
    "io_error": Switch(Effect.REFUSE, (*_READS, *_WRITES, *_FILE_CALLS), numbers.EIO),
    "interrupted": Switch(Effect.REFUSE, ("read", "write"), numbers.EINTR),
    "slow": Switch(Effect.DELAY, ("read", "write")),
}
"""Every fault by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What is about to happen, for ``match``.

    Attributes:
        kind: "submit", "batch_read" and "batch_write" (all requests of one direction in a submit), "read" and "write"
            (one request), "reap", or the name of a call on files.
        path: the file; of a rename the new name; None if the kind has none.
        offset, num_bytes: the part of it, for reads, writes, allocate and truncate.
    """

    kind: str
    path: Path | None = None
    offset: int = 0
    num_bytes: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Fault:
    """A fault that is switched on.

    Attributes:
        hits: calls or requests that it has met.
        held: what it holds back.
    """

    switch: Switch
    errno: int
    match: Callable[[Call], bool]
    every: int
    count: int | None
    limit: int
    seconds: float
    let_go: Callable[["Fault"], None]
    seen: int = 0
    hits: int = 0
    is_on: bool = True
    held: list[Any] = dataclasses.field(default_factory=list)

    def meets(self, call: Call) -> bool:
        """Return whether this call is one to fail, and count it."""
        if call.kind not in self.switch.kinds or self.hits == self.count or not self.match(call):
            return False
        self.seen += 1
        hit = self.seen % self.every == 0
        self.hits += hit
        return hit

    def release(self) -> None:
        """Let everything that is held back go on; what comes later is held again."""
        self.let_go(self)
