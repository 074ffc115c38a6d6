"""Arenas that belong to one engine: a name that its processes know, and the removal of what killed ones left."""

import logging
import os
from pathlib import Path

from . import locks, memory
from .liveness import session_digest

logger = logging.getLogger(__name__)

_PRIVATE_PREFIX = "kvferry-"
_PRIVATE_SUFFIX = ".arena"


def private_arena_path(engine_id: str) -> Path:
    """Return where the processes of engine *engine_id* meet."""
    name = f"{_PRIVATE_PREFIX}{os.geteuid()}-{session_digest(engine_id):016x}{_PRIVATE_SUFFIX}"
    return memory.private_directory() / name


def sweep_private_arenas() -> list[Path]:
    """Remove private arenas of this user that no process has open (their engine was killed); return them."""
    removed = []
    pattern = f"{_PRIVATE_PREFIX}{os.geteuid()}-{'[0-9a-f]' * 16}{_PRIVATE_SUFFIX}"
    for path in memory.private_directory().glob(pattern):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            logger.debug("left %s alone: %s", path, error)
            continue
        try:
            if locks.try_lock(fd, locks.Lock.CREATE) and locks.try_lock(fd, locks.Lock.ATTACHED):
                path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(fd)
    return removed
