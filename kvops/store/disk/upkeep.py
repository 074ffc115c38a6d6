"""What the disk thread does for the folder beside the moves: syncs that are due, a shorter journal, figures for whoever looks."""

import logging
import time
from collections.abc import Callable

from .files import BlobFiles

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 5.0
"""Time between two reports, seconds."""


class Upkeep:
    """Threads: the disk thread. *report* is called every few seconds."""

    def __init__(self, files: BlobFiles, report: Callable[[], None]) -> None:
        self._files = files
        self._report = report
        self._next_report_s = 0.0
        self._said_sync = False

    def see_to(self, *, is_idle: bool) -> None:
        """Do what is due; what can wait until nobody waits for the disk, then."""
        try:
            self._files.sync_if_due()
            self._said_sync = False
        except OSError as error:
            # what it would have made durable is as it is under "never"; the next save meets the same disk, and counts
            if not self._said_sync:
                self._said_sync = True
                logger.warning("disk tier: sync: %s; trying again each second", error)
        if is_idle:
            self._files.tidy()
        now = time.monotonic()
        if now >= self._next_report_s:
            self._next_report_s = now + REPORT_EVERY_S
            self._report()
