"""What the scheduler's half remembers of one request, kept in the request's own context (``ReqContext.set_state``)."""

from dataclasses import dataclass, field

from kvferry.kvops.store.frame import Frame


@dataclass(slots=True)
class RequestState:
    """One request as the store sees it.

    Attributes:
        epoch: number of the cache epoch in which the rest was written; older content counts as empty.
        skip: why no more chunks of this request are stored; empty while they are.
        deadline_s: until when (monotonic clock) the request waits for chunks being written or read from the disk; 0 before it
            met one.
        gave_up: the deadline has passed once, and has been counted.
        stores: frames being written for it, in the order of their reservation.
        loads: frames being read for it; None for one that went away before the load was prepared.
        keys: keys stored or loaded, for engines that don't keep a list of their own.
        from_disk: keys of its last load that had just come from the disk.
    """

    epoch: int
    skip: str = ""
    deadline_s: float = 0.0
    gave_up: bool = False
    stores: dict[bytes, Frame] = field(default_factory=dict)
    loads: dict[bytes, Frame | None] = field(default_factory=dict)
    keys: dict[bytes, None] = field(default_factory=dict)
    from_disk: frozenset[bytes] = frozenset()

    def may_wait(self, now_s: float, timeout_s: float) -> bool:
        """Return whether the request may wait (longer) for a chunk that will be readable; the first wait starts the clock."""
        if not self.deadline_s:
            self.deadline_s = now_s + timeout_s
        return now_s < self.deadline_s

    def stop_waiting(self) -> None:
        """Note that the wait is over; another one has a deadline of its own."""
        self.deadline_s = 0.0
        self.gave_up = False

    def start_over(self, epoch: int) -> None:
        """Forget everything, and store nothing more: the frames and the blocks belong to an epoch that is gone."""
        self.epoch = epoch
        # what it computed belongs to the epoch that is gone, and vLLM would offer it again, from the first chunk on, with
        # blocks of a sliding window that have long been another request's
        self.skip = "reset"
        self.stop_waiting()
        self.from_disk = frozenset()
        self.stores.clear()
        self.loads.clear()
        self.keys.clear()
