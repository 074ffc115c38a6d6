"""Findings, and a report of them that always prints.

A probe is a function that yields findings. One that raises becomes a finding itself, and the others
still run.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

LEVELS = ("ok", "warn", "bad")
"""Fine; slower or less than it could be; does not work."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fact about this machine."""

    section: str
    name: str
    value: str
    """What was found, in words."""
    level: str = "ok"
    advice: str = ""
    """A sentence that says what to do; may be empty only if the level is ``ok``."""
    data: object = None
    """The same for programs: JSON values; sizes in bytes."""

    def __post_init__(self) -> None:
        """Check what we promise to readers."""
        assert self.level in LEVELS
        assert self.advice or self.level == "ok", f"{self.name}: no advice"


def collect(probes: Sequence[tuple[str, Callable[[], Iterable[Finding]]]]) -> Iterator[Finding]:
    """Run every probe, given with its section; yield what they find, failures included."""
    for section, probe in probes:
        yield from _guarded(section, probe)


def _guarded(section: str, probe: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from probe()
    except Exception as error:
        name = getattr(probe, "__name__", "probe").strip("_").replace("_", " ")
        yield Finding(
            section,
            name,
            f"could not be found out: {type(error).__name__}: {error}",
            "warn",
            "The rest of this report stands; please report this line as a bug.",
        )


def as_json(findings: Sequence[Finding], version: str) -> dict[str, object]:
    """Return the report as JSON values."""
    return {
        "kvferry": version,
        "summary": _count(findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def as_text(findings: Sequence[Finding], version: str, width: int = 100) -> str:
    """Return the report for people, ending in a line feed; *width* is in columns."""
    lines = [f"kvferry {version} doctor"]
    section = ""
    name_width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section]
        start = f"  {finding.level:<4}  {finding.name:<{name_width}}  "
        indent = " " * len(start)
        lines += _wrapped(finding.value or "-", width, start, indent)
        if finding.advice:
            lines += _wrapped(f"-> {finding.advice}", width, indent, indent + "   ")
    counts = _count(findings)
    lines += ["", ", ".join(f"{counts[level]} {level}" for level in LEVELS)]
    return "\n".join(lines) + "\n"


def _count(findings: Sequence[Finding]) -> dict[str, int]:
    return {level: sum(finding.level == level for finding in findings) for level in LEVELS}


def _wrapped(text: str, width: int, first: str, others: str) -> list[str]:
    # paths and commands must stay whole, to be copied
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
