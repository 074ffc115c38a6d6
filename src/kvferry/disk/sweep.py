"""`kvferry disk gc` and `kvferry disk wipe`: delete what is of no use, or everything."""

import argparse
import sys
from pathlib import Path
from typing import Any

from kvferry.kvops.errors import ConfigError, DiskBusyError
from kvferry.kvops.settings import format_bytes
from kvferry.kvops.store.disk import folder as folders
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.io_threads import ThreadIo

from .folder import check, opened, owner

EXIT_FINE = 0
EXIT_OTHER = 2


def collect(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Delete what is in quarantine and compact the journal; return the counts as JSON values, and the exit code.

    Keys: slots: taken back into use. files, bytes: deleted from quarantine. records: dead ones that left the journal.
    used_bytes: what the folder takes now; freed_bytes: how much less that is than before.

    Raises:
        DiskBusyError: a live process uses the folder.
        DiskError: it can't be opened.
    """
    with opened(folder, write=True) as files:
        before = _used(files)
        counts = files.gc()
        after = _used(files)
    return {"folder": str(folder), **counts, "used_bytes": after, "freed_bytes": before - after}, 0


def _used(files: BlobFiles) -> int:
    stats = files.stats()
    return stats["used_bytes"] + stats["quarantined_file_bytes"]


def wipe(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Delete all blobs, after asking; return the counts as JSON values, and the exit code.

    Keys: wiped: whether it was done. files, bytes: deleted. Files that are not the tier's stay, as does the folder.

    Raises:
        DiskBusyError: a live process uses the folder.
        DiskError: it is no folder of the disk tier.
        ConfigError: nobody is there to be asked.
    """
    check(folder)
    pid = owner(folder)
    if pid is not None:
        # before anybody is asked; the lock is what counts in the end
        raise DiskBusyError(f"{folder} is in use by process {pid}; end it first")
    if not args.yes and not _agrees(folder):
        return {"folder": str(folder), "wiped": False, "files": 0, "bytes": 0}, EXIT_OTHER
    io = ThreadIo(threads=1)
    try:
        counts = folders.wipe(io, folder)
    finally:
        io.close(10.0)
    return {"folder": str(folder), "wiped": True, **counts}, EXIT_FINE


def _agrees(folder: Path) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("wipe asks before it deletes, and there is nobody to ask; say --yes")
    listing = folders.list_files(folder)
    paths = [*listing.journals.values(), *listing.segments.values()]
    size = format_bytes(sum(path.lstat().st_blocks * 512 for path in paths))
    # stdout is for the result
    print(f"Delete all blobs in {folder} ({size})? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
