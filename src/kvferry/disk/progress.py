"""Progress on stderr, for whatever takes longer than two seconds: a bar on a terminal, a line now and then elsewhere."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from kvferry.kvops.settings import format_bytes

SHOW_AFTER_S = 2.0
BAR_EVERY_S = 0.1
LINE_EVERY_S = 10.0
BAR_COLUMNS = 24


class Progress:
    """How far something is. Call it with what is done and, if that has changed, how much there is to do.

    Args:
        label: what goes on, in words.
        total: how much there is to do; 0 while that is not known.
        is_bytes: whether these are bytes; a speed is shown then.
        stream: where to; None for stderr.
        clock: seconds.
    """

    def __init__(
        self,
        label: str,
        total: int = 0,
        *,
        is_bytes: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._total = total
        self._is_bytes = is_bytes
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_bar = self._stream.isatty()
        self._begin = clock()
        self._next = self._begin + SHOW_AFTER_S
        self._is_shown = False

    def __call__(self, done: int, total: int | None = None) -> None:
        """Show it if it is time to."""
        now = self._clock()
        if now < self._next:
            return
        self._total = self._total if total is None else total
        self._next = now + (BAR_EVERY_S if self._is_bar else LINE_EVERY_S)
        text = self._text(done, now - self._begin)
        if self._is_bar:
            columns = shutil.get_terminal_size((100, 24)).columns - 1
            self._stream.write(f"\r\033[K{text[:columns]}")
            self._is_shown = True
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Take the bar away."""
        if self._is_shown:
            self._is_shown = False
            self._stream.write("\r\033[K")
            self._stream.flush()

    def _text(self, done: int, seconds: float) -> str:
        shown = format_bytes if self._is_bytes else str
        if not self._total:
            return f"{self._label}: {shown(done)}"
        share = min(1.0, done / self._total)
        text = f"{share:4.0%}  {shown(done)} of {shown(self._total)}"
        if self._is_bytes:
            text += f", {done / seconds / 1e9:.2f} GB/s"
        if share > 0:
            text += f", {_duration(seconds / share - seconds)} left"
        bar = f" [{'#' * int(share * BAR_COLUMNS):<{BAR_COLUMNS}}]" if self._is_bar else ""
        return f"{self._label}{bar} {text}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
