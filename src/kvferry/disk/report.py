"""What the disk commands found, as text for people. The JSON values are the input."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.kvops.settings import format_bytes

MOST_BLOBS = 20
"""Damaged blobs that are listed one by one; --json has all of them."""

_STAGE_COLUMNS = ("stage", "count", "avg", "p50", "p99", "max", "total")


def _lines(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def _head(found: Mapping[str, Any]) -> str:
    pid = found["in_use_by"]
    return f"{found['folder']}: " + ("not in use" if pid is None else f"in use by process {pid}")


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "none"


def stats_text(found: Mapping[str, Any]) -> str:
    """Return the text of `kvferry disk stats`."""
    quota, used = found["quota_bytes"], found["used_bytes"]
    share = f", {used / quota:.0%} used" if quota else ""
    quarantine = found["quarantine"]
    lines = [
        _head(found),
        f"  quota       {format_bytes(quota) if quota else 'unknown'}{share}",
        f"  used        {format_bytes(used)} in {found['segments']} segments; "
        f"journal {format_bytes(found['journal_bytes'])}",
        f"  blobs       {found['blobs']} ({format_bytes(found['blob_bytes'])}); "
        f"{found['free_slots']} slots free",
        f"  quarantine  blobs: {_reasons(quarantine['slots'])}; files: {_reasons(quarantine['files'])}",
    ]
    if found["unusable_files"] or found["discarded_records"]:
        lines.append(
            f"  unusable    {found['unusable_files']} files, {found['discarded_records']} journal records"
        )
    for item in found["namespaces"]:
        size = format_bytes(item["blob_bytes"])
        lines.append(f"  namespace   {item['namespace']}  {item['blobs']} blobs, {size}")
    last = found["last_run"]
    if last is None:
        return _lines([*lines, "  counted by  nobody: no statistics were left"])
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["written"]))
    lines.append(f"  counted by  process {last['pid']}, as of {when}")
    return _lines([*lines, *_stages(last["stages"]), *_counters(last["stats"])])


def _stages(stages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not stages:
        return []
    rows: list[tuple[str, ...]] = [_STAGE_COLUMNS]
    for name, stage in stages.items():
        times = [seconds_text(stage[key]) for key in ("avg_s", "p50_s", "p99_s", "max_s", "sum_s")]
        rows.append((name, str(stage["count"]), *times))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_STAGE_COLUMNS))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("    " + "  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    return ["", *lines]


def _counters(stats: Mapping[str, Any]) -> list[str]:
    shown = {name: value for name, value in stats.items() if value}
    if not shown:
        return []
    width = max(map(len, shown))
    return ["", *(f"    {name:<{width}}  {_value(name, value)}" for name, value in shown.items())]


def _value(name: str, value: Any) -> str:
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def seconds_text(seconds: float) -> str:
    """Return a time in the unit that suits it, with three digits."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def verify_text(found: Mapping[str, Any]) -> str:
    """Return the text of `kvferry disk verify`."""
    seconds = found["seconds"]
    size = found["checked_bytes"]
    speed = f", {size / seconds / 1e9:.2f} GB/s" if seconds else ""
    lines = [
        _head(found),
        f"  checked     {found['checked']} blobs ({format_bytes(size)}) in {seconds:.1f} s{speed}",
        f"  damaged     blobs: {_reasons(found['damaged'])}; files: {_reasons(found['files'])}",
    ]
    if found["changed"]:
        lines.append(f"  changed     {found['changed']} blobs that the owner replaced meanwhile")
    if found["in_quarantine"]:
        lines.append(f"  quarantine  held before: {_reasons(found['in_quarantine'])}")
    if found["discarded_records"]:
        lines.append(f"  journal     {found['discarded_records']} records can't be used")
    for blob in found["blobs"][:MOST_BLOBS]:
        where = f"{blob['segment']} at {blob['offset']}"
        lines.append(f"    {blob['tag']}  {where}  {blob['reason']}")
    if len(found["blobs"]) > MOST_BLOBS:
        lines.append(f"    … and {len(found['blobs']) - MOST_BLOBS} more: --json lists them")
    if found["quarantined"]:
        lines.append(f"  {found['quarantined']} blobs put into quarantine")
    elif found["blobs"]:
        lines.append(f"  -> kvferry disk verify --quarantine {found['folder']}")
    return _lines(lines)


def gc_text(found: Mapping[str, Any]) -> str:
    """Return the text of `kvferry disk gc`."""
    return _lines(
        [
            f"{found['folder']}: {format_bytes(max(0, found['freed_bytes']))} freed, "
            f"{format_bytes(found['used_bytes'])} in use",
            f"  quarantine  {found['slots']} slots back in use, {found['files']} files deleted "
            f"({format_bytes(found['bytes'])})",
            f"  journal     {found['records']} dead records gone",
        ]
    )


def wipe_text(found: Mapping[str, Any]) -> str:
    """Return the text of `kvferry disk wipe`."""
    if not found["wiped"]:
        return f"{found['folder']}: nothing deleted\n"
    return f"{found['folder']}: {found['files']} files deleted ({format_bytes(found['bytes'])})\n"


TEXTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "stats": stats_text, "verify": verify_text, "gc": gc_text, "wipe": wipe_text,
}  # fmt: skip
