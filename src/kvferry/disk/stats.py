"""`kvferry disk stats`: what a folder holds now, and what its last owner counted and timed."""

import argparse
import collections
import dataclasses
from pathlib import Path
from typing import Any

from kvferry.kvops.store.disk import folder as folders
from kvferry.kvops.store.disk import last_run

from .folder import opened, owner
from .progress import Progress


def run(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Return what there is to say about *folder* as JSON values, and the exit code; also beside a live owner.

    Keys: used_bytes: files of the folder, as the file system counts them. quota_bytes: of the last owner, null if it left
    none. blobs, blob_bytes: that can be loaded. namespaces: the same for each namespace tag. quarantine: slots and files
    out of use, by reason. last_run: what its last owner wrote (kvops/store/disk/last_run.py), or null.

    Raises:
        DiskError: the folder can't be opened.
    """
    blobs: collections.Counter[int] = collections.Counter()
    blob_bytes: collections.Counter[int] = collections.Counter()
    slots: collections.Counter[str] = collections.Counter()
    with opened(folder, write=False) as files:
        stats = files.stats()
        progress = Progress("counting blobs", stats["blobs"] + stats["quarantined_slots"])
        for number, entry in enumerate(files.entries()):
            if entry.is_ready:
                blobs[entry.namespace] += 1
                blob_bytes[entry.namespace] += entry.blob_bytes
            else:
                slots[entry.reason] += 1
            progress(number)
        progress.close()
    last = last_run.read(folder)
    return {
        "folder": str(folder),
        "in_use_by": owner(folder),
        "quota_bytes": last.stats.get("quota_bytes") if last else None,
        "used_bytes": stats["used_bytes"] + stats["quarantined_file_bytes"],
        "journal_bytes": stats["journal_bytes"],
        "blobs": stats["blobs"],
        "blob_bytes": stats["blob_bytes"],
        "segments": stats["segments"],
        "free_slots": stats["free_slots"],
        "discarded_records": stats["discarded_records"],
        "unusable_files": stats["unusable_files"],
        "namespaces": [
            {"namespace": f"{tag:016x}", "blobs": count, "blob_bytes": blob_bytes[tag]}
            for tag, count in blobs.most_common()
        ],
        "quarantine": {"slots": dict(slots), "files": _quarantined_files(folder)},
        "last_run": dataclasses.asdict(last) if last else None,
    }, 0


def _quarantined_files(folder: Path) -> dict[str, int]:
    reasons: collections.Counter[str] = collections.Counter()
    for path, _ in folders.quarantined_files(folder):
        try:
            first = path.with_name(f"{path.name}.reason").read_text().split("\n", 1)[0]
        except (OSError, ValueError):
            first = ""
        reasons[first or "unknown"] += 1
    return dict(reasons)
