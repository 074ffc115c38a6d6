"""What a section of the device check hands over: rows of a CSV file, notes, and how each case ended.

A row is written and flushed when it is made: a process that dies later loses nothing that was measured before.
"""

import csv
import dataclasses
import datetime
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from perf.harness import Row

NOTE = "note: "
"""What begins a line of a section's output that belongs in the summary."""


class DeviceLostError(RuntimeError):
    """The device reports an error that stays: nothing more can run in this process."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that a section does.

    Attributes:
        name: unique in its section.
        num_bytes: bytes that one operation moves (0: none).
        detail: shapes and settings, for the dry run.
        run: does it, and records what it saw.
    """

    name: str
    num_bytes: int
    detail: str
    run: Callable[[Any], None]


class Recorder:
    """Rows and notes of one section.

    Attributes:
        rows: what was recorded, in order.
    """

    def __init__(self, section: str, machine: dict[str, str], csv_path: Path | None) -> None:
        self.section = section
        self.rows: list[Row] = []
        self._machine = machine
        self._path = csv_path

    def row(
        self,
        case: str,
        provider: str,
        *,
        us: Iterable[float] = (),
        num_bytes: int = 0,
        roof_gbps: float = 0.0,
        roof_us: float = 0.0,
        match: bool | str | None = None,
        **more: object,
    ) -> None:
        """Record one figure.

        Args:
            case: what was done.
            provider: by what.
            us: microseconds of one operation, one of each round; none for a row that only says whether bytes match.
            num_bytes: bytes that one operation moved.
            roof_gbps: the most that this link did in this run, in GB/s.
            roof_us: for work that is no transfer: what it takes undisturbed.
            match: whether the bytes are right; None where a row has none. Wrong bytes keep no figures.
            more: other fields of `Row`.
        """
        times = sorted(us)
        verdict = match if isinstance(match, str) else {True: "yes", False: "no", None: ""}[match]
        made = Row(
            timestamp=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **self._machine, bench=f"device_check {self.section}", case=case, provider=provider, bytes=num_bytes,
            match=verdict, command=f"python -m perf.device_check --only {self.section}", **more,
        )  # fmt: skip
        if times and verdict not in ("no", "error"):
            made.p50_us = statistics.median(times)
            made.p20_us, made.p80_us = times[len(times) // 5], times[-1 - len(times) // 5]
            made.roof_gbps = roof_gbps
            if num_bytes and made.p50_us:
                made.gbps = num_bytes / made.p50_us / 1e3
            if roof_gbps:
                made.roof_pct = 100 * made.gbps / roof_gbps
            elif roof_us:
                made.roof_pct = 100 * roof_us / made.p50_us
        self.rows.append(made)
        if self._path is not None:
            append(self._path, made)
        print(line(made), flush=True)

    def note(self, text: str) -> None:
        """Say something that belongs in the summary."""
        print(NOTE + text, flush=True)


def line(row: Row) -> str:
    """Return *row* as a line of text."""
    if row.match in ("no", "error") or not row.p50_us:
        return f"{row.case:<44} {row.provider:<22} {row.bytes:>11} {'':>33} {row.match or '-'}"
    speed = f"{row.gbps:8.2f}" if row.gbps else f"{'':>8}"
    share = f"{row.roof_pct:5.0f} %" if row.roof_pct else f"{'':>7}"
    return (
        f"{row.case:<44} {row.provider:<22} {row.bytes:>11} {row.p50_us:>12.2f} us {speed} {share} "
        f"  {row.match or '-'}"
    )


def append(path: Path, row: Row) -> None:
    """Add *row* to the file at *path*, with a header if it is the first."""
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, [field.name for field in dataclasses.fields(Row)])
        if stream.tell() == 0:
            writer.writeheader()
        writer.writerow(dataclasses.asdict(row))


def guarded(case: Case, context: Any, recorder: Recorder, usable: Callable[[], None]) -> bool:
    """Run *case*; return whether it ended without an exception.

    Args:
        case: what to run.
        context: handed to it.
        recorder: where a failure is recorded, as a row with match "error".
        usable: raises when the device can do nothing any more.

    Raises:
        DeviceLostError: after the failure the device can do nothing any more.
    """
    try:
        case.run(context)
        usable()
    except Exception as error:
        # the rest of the section is worth more than this case: its error goes into the CSV and the log
        traceback.print_exc(file=sys.stdout)
        recorder.row(case.name, type(error).__name__, match="error")
        recorder.note(f"{recorder.section}: {case.name}: {type(error).__name__}: {_first(error)}")
        try:
            usable()
        except Exception as lost:
            raise DeviceLostError(f"after {case.name}: {_first(lost)}") from error
        return False
    return True


def _first(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else ""
