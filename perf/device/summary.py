"""The summary of a device run: how sections ended, figures beside their predictions, the best way of each case."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from perf.device.predictions import PREDICTIONS
from perf.device.schedule import Outcome

CsvRow = dict[str, str]


def read(path: Path) -> list[CsvRow]:
    """Return the rows of the file at *path*, none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def render(rows: Sequence[CsvRow], outcomes: Iterable[Outcome], seconds: float) -> str:
    """Return the summary as a document."""
    lines = ["# Device check", ""]
    if rows:
        row = rows[-1]
        lines += [
            f"{row['gpu']} | driver {row['driver']} | torch {row['torch']} triton {row['triton']} | PCIe {row['pcie']} | "
            f"{row['host_cpu']} | kvferry {row['version']} ({row['commit']}) | {row['timestamp']} | {seconds:.0f} s",
            "",
        ]
    lines += _sections(rows, outcomes)
    lines += _predictions(rows)
    lines += _best(rows)
    return "\n".join(lines) + "\n"


def _sections(rows: Sequence[CsvRow], outcomes: Iterable[Outcome]) -> list[str]:
    lines = [
        "| section | ended | rows | right bytes | wrong | failed | s | processes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for outcome in outcomes:
        mine = of_section(rows, outcome.section.name)
        count = {
            verdict: sum(row["match"] == verdict for row in mine)
            for verdict in ("yes", "no", "error")
        }
        lines.append(
            f"| {outcome.section.name} | {outcome.ended} | {len(mine)} | {count['yes']} | {count['no']} | "
            f"{count['error']} | {outcome.seconds:.0f} | {outcome.starts} |"
        )
        notes += [f"- {note}" for note in outcome.notes]
        notes += [
            f"- wrong bytes: {outcome.section.name}: {row['case']} by {row['provider']}"
            for row in mine
            if row["match"] == "no"
        ]
    return [*lines, "", *notes, *([""] if notes else [])]


def _predictions(rows: Sequence[CsvRow]) -> list[str]:
    lines = [
        "## Beside the predictions",
        "",
        "| section | what | predicted | measured | |",
        "|---|---|---|---|---|",
    ]
    for prediction in PREDICTIONS:
        figure = prediction.measured(rows)
        if figure is None:
            lines.append(
                f"| {prediction.section} | {prediction.what} | {prediction.range} | - | not measured |"
            )
            continue
        verdict = (
            "as predicted"
            if prediction.low <= figure <= prediction.high
            else "**not as predicted**"
        )
        lines.append(
            f"| {prediction.section} | {prediction.what} | {prediction.range} | {figure:.3g} | {verdict} |"
        )
    return [*lines, ""]


def _best(rows: Sequence[CsvRow]) -> list[str]:
    """Return one line for each case that moved bytes: the fastest way, and what came next."""
    lines = [
        "## Fastest way of each case",
        "",
        "| section | case | best | GB/s | of roof | next |",
        "|---|---|---|---|---|---|",
    ]
    cases: dict[tuple[str, str], list[CsvRow]] = {}
    for row in rows:
        if row["match"] == "yes" and float(row["gbps"]):
            cases.setdefault((row["bench"].removeprefix("device_check "), row["case"]), []).append(
                row
            )
    for (section, case), found in cases.items():
        best, *others = sorted(found, key=lambda row: -float(row["gbps"]))
        after = f"{others[0]['provider']}: {float(others[0]['gbps']):.1f}" if others else ""
        lines.append(
            f"| {section} | {case} | {best['provider']} | {float(best['gbps']):.1f} | {float(best['roof_pct']):.0f} % | {after} |"
        )
    return [*lines, ""] if cases else []


def of_section(rows: Iterable[CsvRow], section: str) -> list[CsvRow]:
    """Return those of *rows* that *section* made."""
    return [row for row in rows if row["bench"] == f"device_check {section}"]
