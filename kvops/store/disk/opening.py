"""Open the disk tier of a store as the settings say."""

from pathlib import Path

from kvferry.kvops.config import Config
from kvferry.kvops.errors import ConfigError
from kvferry.kvops.store.io_choice import open_io
from kvferry.kvops.store.store import Store

from .admission import Policy
from .files import BlobFiles
from .folder import prepare
from .tier import DiskTier

QUEUE_DEPTH = 32
"""Requests in flight on the drive."""

LONGEST_HOLD_S = 10.0
"""How long a chunk that came up is kept for a request that does not come back for it."""

MAX_IO_BYTES = 256 << 20
"""Bytes in flight on the drive."""


def open_tier(store: Store, settings: Config) -> DiskTier:
    """Take the folder ``disk_path`` over and put it below *store*.

    Raises:
        ConfigError: the settings have no ``disk_path``.
        DiskError: the folder can't be used; the message says why.
        OSError: the disk is full, or failed.
    """
    if settings.disk_path is None:
        raise ConfigError("disk_path must be a folder; got null")
    folder = Path(settings.disk_path)
    prepare(folder, create=True)
    io = open_io(settings.disk_io, folder, depth=QUEUE_DEPTH, max_inflight_bytes=MAX_IO_BYTES)
    try:
        files = BlobFiles.open(
            folder,
            io,
            quota_bytes=settings.disk_bytes,
            free_floor_bytes=settings.disk_free_floor_bytes,
            sync=settings.disk_sync,
        )
    except BaseException:
        io.close(0.0)
        raise
    policy = Policy(
        write=settings.disk_write,
        admission=settings.disk_admission,
        timeout_s=settings.disk_timeout_ms / 1000,
        # longer than whoever asked for the first chunk of a prefix waits for its last
        hold_s=min(2 * settings.pending_timeout_ms / 1000 + 1, LONGEST_HOLD_S),
    )
    try:
        return DiskTier(store, files, io, policy)
    except BaseException:
        files.close()
        io.close(0.0)
        raise
