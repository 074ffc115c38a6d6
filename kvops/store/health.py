"""What an arena file holds, read without mapping it and without changing a byte: for `kvferry doctor`."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.kvops.errors import ArenaError

from . import format as fmt
from . import locks
from .arena import check_superblock
from .liveness import is_alive
from .spans import read_spans


def inspect_arena(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Report on an arena file; what can't be read is said under "error".

    Returns:
        path, arena_bytes, format_version, owner ("live pid N" or None), attached (live processes), frames (count by
        state), used_bytes (of ready and writing frames), slabs (by use), error (None or a sentence).
    """
    report: dict[str, Any] = {
        "path": str(path), "arena_bytes": None, "format_version": None, "owner": None, "attached": 0,
        "frames": {}, "used_bytes": 0, "slabs": {}, "error": None,
    }  # fmt: skip
    try:
        # not mapped: a file that shrinks meanwhile must not kill the reader
        with Path(path).open("rb") as stream:
            _inspect(stream.fileno(), Path(path), report)
    except (OSError, ArenaError, ValueError) as error:
        report["error"] = str(error)
    return report


def _inspect(fd: int, path: Path, report: dict[str, Any]) -> None:
    size = os.fstat(fd).st_size
    head = os.pread(fd, fmt.SUPERBLOCK_BYTES, 0)
    if head[:8] == fmt.MAGIC_UNFINISHED:
        report["error"] = "its creation was never finished; it will be made anew"
        return
    if head[:8] != fmt.MAGIC or len(head) < fmt.SUPERBLOCK_BYTES:
        report["error"] = "it is not a kvferry arena"
        return
    report["arena_bytes"] = size
    report["format_version"] = int.from_bytes(head[8:12], "little")
    check_superblock(head[: fmt.SUPERBLOCK.size], size, None, path)
    if locks.is_held(fd, locks.Lock.OWNER):
        pid, _, _ = fmt.OWNER.unpack_from(head, fmt.OWNER_OFFSET)
        report["owner"] = f"live pid {pid}"
    table = os.pread(fd, fmt.ATTACH_SLOTS * fmt.ATTACH_BYTES, fmt.ATTACH_OFFSET)
    report["attached"] = sum(
        is_alive(pid, start) for pid, start, *_ in fmt.ATTACH.iter_unpack(table)
    )
    report.update(_census(fd, head))


def _census(fd: int, head: bytes) -> dict[str, Any]:
    """Count frames by state, bytes in use and slabs by use."""
    _, _, _, _, slab_bytes, slab_count, data, span_table, _ = fmt.SUPERBLOCK.unpack_from(head, 0)
    frames = {state.name.lower(): 0 for state in fmt.State}
    used_bytes = 0
    slabs = {"frames": 0, "index": 0}
    tables = memoryview(os.pread(fd, data, 0))
    for span in read_spans(tables, span_table, slab_bytes, slab_count, data):
        if span.size is None:
            slabs["index"] += span.slabs
            continue
        slabs["frames"] += span.slabs
        size = span.size.header_bytes
        heads = np.frombuffer(os.pread(fd, span.frame_count * size, span.headers), dtype=np.uint8)
        states = heads.reshape(span.frame_count, size)[:, 0]
        for state in fmt.State:
            count = int(np.count_nonzero(states == state))
            frames[state.name.lower()] += count
            if state in (fmt.State.READY, fmt.State.WRITING):
                used_bytes += count * span.size.frame_bytes
    slabs["free"] = slab_count - slabs["frames"] - slabs["index"]
    return {"frames": frames, "used_bytes": used_bytes, "slabs": slabs}
