"""`kvferry disk verify`: read every blob and compare every checksum."""

import argparse
import collections
import concurrent.futures
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.kvops.store.disk import folder as folders
from kvferry.kvops.store.disk import format as disk
from kvferry.kvops.store.disk.files import BlobFiles, Entry

from .folder import READERS, check, opened, owner
from .progress import Progress

EXIT_FINE = 0
EXIT_DAMAGE = 1

AHEAD = 8
"""Blobs that a reader may be ahead of what is looked at."""

LOOKS = 3
LOOK_AGAIN_AFTER_S = 0.5
"""How often, and after how long, a blob in a folder in use is looked at again: its owner may be replacing it."""

Suspects = list[tuple[Entry, str]]


def run(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Verify *folder*; return what was found as JSON values, and the exit code.

    Keys: checked, checked_bytes: blobs that were read. damaged: how many blobs, by reason; blobs: each of them. files:
    how many files can't be used, by reason; --quarantine moves them away. changed: blobs that an owner replaced meanwhile. quarantined: blobs that
    --quarantine put out of use. in_quarantine: how many were before, by reason. discarded_records: of the journal.

    Raises:
        DiskError: the folder can't be opened.
    """
    begin = time.monotonic()
    quarantined = 0
    check(folder)
    # before an owner, which --quarantine makes us, moves them away
    unusable = _unusable(folder)
    with opened(folder, write=args.quarantine) as files:
        pid = None if args.quarantine else owner(folder)
        checked, in_quarantine, suspects = _check_all(files)
        stats = files.stats()
        if args.quarantine:
            quarantined = sum(_quarantine(files, entry, reason) for entry, reason in suspects)
    # journals are the rest
    unusable[disk.OTHER] = stats["unusable_files"] - unusable.total()
    suspected = len(suspects)
    if pid is not None:
        suspects = _look_again(folder, suspects)
    found = {
        "folder": str(folder),
        "in_use_by": pid,
        **checked,
        "damaged": dict(collections.Counter(reason for _, reason in suspects)),
        "files": {reason: count for reason, count in unusable.items() if count > 0},
        "changed": suspected - len(suspects),
        "quarantined": quarantined,
        "in_quarantine": dict(in_quarantine),
        "discarded_records": stats["discarded_records"],
        "seconds": round(time.monotonic() - begin, 3),
        "blobs": [_describe(entry, reason) for entry, reason in suspects],
    }
    return found, EXIT_DAMAGE if suspects or found["files"] else EXIT_FINE


def _check_all(files: BlobFiles) -> tuple[dict[str, int], collections.Counter[str], Suspects]:
    checked = {"checked": 0, "checked_bytes": 0}
    in_quarantine: collections.Counter[str] = collections.Counter()
    suspects: Suspects = []

    def ready() -> Iterator[Entry]:
        for entry in files.entries():
            if entry.is_ready:
                yield entry
            else:
                in_quarantine[entry.reason] += 1

    progress = Progress("verifying", files.stats()["blob_bytes"], is_bytes=True)
    with concurrent.futures.ThreadPoolExecutor(READERS, "kvferry-verify") as pool:
        waiting: collections.deque[tuple[Entry, concurrent.futures.Future[str | None]]]
        waiting = collections.deque()

        def take() -> None:
            entry, answer = waiting.popleft()
            reason = answer.result()
            if reason is not None:
                suspects.append((entry, reason))
            checked["checked"] += 1
            checked["checked_bytes"] += entry.blob_bytes
            progress(checked["checked_bytes"])

        for entry in ready():
            waiting.append((entry, pool.submit(files.check, entry)))
            if len(waiting) >= READERS * AHEAD:
                take()
        while waiting:
            take()
    progress.close()
    return checked, in_quarantine, suspects


def _look_again(folder: Path, suspects: Suspects) -> Suspects:
    """Return those of *suspects* that are still listed as they were, and still wrong."""
    for _ in range(LOOKS):
        if not suspects:
            break
        time.sleep(LOOK_AGAIN_AFTER_S)
        wanted = {(entry.tag, entry.place.generation) for entry, _ in suspects}
        with opened(folder, write=False) as files:
            again = [
                entry
                for entry in files.entries()
                if entry.is_ready and (entry.tag, entry.place.generation) in wanted
            ]
            suspects = [
                (entry, reason) for entry in again if (reason := files.check(entry)) is not None
            ]
    return suspects


def _quarantine(files: BlobFiles, entry: Entry, reason: str) -> bool:
    place = files.begin_load(entry.tag)
    if place is None:
        return False
    is_same = place.generation == entry.place.generation
    files.end_load(place, bad=reason if is_same else None)
    return is_same


def _unusable(folder: Path) -> collections.Counter[str]:
    """Return how many segments can't be used, by reason."""
    reasons: collections.Counter[str] = collections.Counter()
    for number, path in folders.list_files(folder).segments.items():
        try:
            with path.open("rb") as stream:
                block = disk.read_superblock(stream.read(disk.SUPERBLOCK_BYTES))
                size = os.fstat(stream.fileno()).st_size
        except FileNotFoundError:
            # given up by an owner that lives
            continue
        except OSError:
            block, size = disk.UNREADABLE, 0
        if isinstance(block, str):
            reasons[block] += 1
        elif block.segment != number:
            reasons[disk.FOREIGN] += 1
        elif size != block.file_bytes:
            reasons[disk.TRUNCATED if size < block.file_bytes else disk.SHAPE] += 1
    return reasons


def _describe(entry: Entry, reason: str) -> dict[str, Any]:
    low, high = entry.tag
    return {
        "tag": f"{high:016x}{low:016x}",
        "namespace": f"{entry.namespace:016x}",
        "segment": f"seg-{entry.place.segment:08x}.blobs",
        "slot": entry.place.slot,
        "offset": entry.place.offset,
        "blob_bytes": entry.blob_bytes,
        "saved": entry.seconds,
        "reason": reason,
    }
