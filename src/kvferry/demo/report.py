"""What the demo found, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .measure import ModelResult, Phase

_COLUMNS = (
    "model",
    "tokens",
    "cold",
    "own cache",
    "kvferry",
    "new process",
    "identical",
    "stored",
    "loaded",
    "store GB/s",
    "load GB/s",
    "verified",
)
_LEGEND = """\
cold … new process: median time to first token of the same prompts; own cache: the engine's prefix
cache; new process: another engine on the same arena. stored, loaded: chunks. verified: blobs whose
checksum was compared before they were used."""


def as_text(results: Sequence[ModelResult]) -> str:
    """Return the table, what it says, and what is wrong; ends in a line feed."""
    rows = [_COLUMNS, *(_cells(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines += ["", _LEGEND, ""]
    for result in results:
        lines += [f"{result.label}: {sentence}" for sentence in _sentences(result)]
    failed = [result.name for result in results if result.failures]
    lines += ["", f"FAILED: {', '.join(failed)}" if failed else "ok: every check passed"]
    return "\n".join(lines) + "\n"


def as_json(results: Sequence[ModelResult], *, seed: int, seconds: float) -> dict[str, Any]:
    """Return everything as a JSON object; times in seconds."""
    return {
        "ok": bool(results) and not any(result.failures for result in results),
        "seed": seed,
        "seconds": round(seconds, 3),
        "models": [
            {
                **dataclasses.asdict(result),
                "identical": result.is_identical,
                "own_cache_used": _own_cache_used(result),
            }
            for result in results
        ],
    }


def _cells(result: ModelResult) -> tuple[str, ...]:
    phases = result.phases
    return (
        result.label,
        str(result.prompt_tokens),
        _time(phases.get("cold")),
        _time(phases.get("own")) if _own_cache_used(result) or "own" not in phases else "off",
        _time(phases.get("kvferry")),
        _time(phases.get("new_process")),
        "-" if not phases else "yes" if result.is_identical else "NO",
        str(result.stored_chunks),
        str(result.loaded_chunks),
        f"{result.store_gbps:.1f}" if result.store_gbps else "-",
        f"{result.load_gbps:.1f}" if result.load_gbps else "-",
        str(result.verified_blobs),
    )


def _time(phase: Phase | None) -> str:
    if phase is None:
        return "-"
    return f"{phase.ttft_s * 1e3:.1f} ms" if phase.ttft_s < 1 else f"{phase.ttft_s:.2f} s"


def _own_cache_used(result: ModelResult) -> bool:
    own = result.phases.get("own")
    return own is not None and own.own_hits > 0


def _sentences(result: ModelResult) -> list[str]:
    """Return what the table has no room for."""
    said = [f"FAILED: {failure}" for failure in result.failures]
    said += [f"note: {remark}" for remark in result.remarks]
    phases = result.phases
    if "own" in phases and not _own_cache_used(result):
        said.append("the engine switches its own prefix cache off for this model on this device")
    if "kvferry" in phases:
        hits = [phases[name].external_hits for name in ("kvferry", "new_process") if name in phases]
        total = result.prompts * result.prompt_tokens
        said.append(
            f"the engine counts {' and '.join(str(hit) for hit in hits)} of {total} prompt tokens"
            " as loaded through the connector"
        )
        said.append(
            f"loading took {phases['kvferry'].ttft_s / phases['cold'].ttft_s:.2f} of the time to"
            f" compute; a decode step takes {phases['cold'].step_s * 1e3:.1f} ms"
        )
    if result.first_token_changes is not None:
        swapped = "changes" if result.swap_changes else "does not change"
        said.append(
            f"another first prompt token changes {result.first_token_changes:.0%} of the output"
            f" tokens; swapping stored blobs {swapped} the answer"
        )
    return said
