"""kvferry: carry an LLM server's KV cache blocks to a shared-memory store and back.

This file is the door: a name that is not in ``__all__`` is private. vLLM users need
``kvferry.vllm`` only; the parts below (``kvferry.kernels``, ``kvferry.kvops``) work without vLLM.

Public names:
    ``__version__``: the version of this package, a string.
    ``Arena``: shared memory that holds the blobs; opened by every process.
    ``Store``: the chunks of one arena, for the process that owns it.
    ``Frames``: the frames of one arena, for a process that fills and reads them.
    ``Lookup``, ``Reserve``: answers of the store.
    ``DiskTier``: a folder on a disk below a store.
    ``open_tier``: makes a disk tier as a ``Config`` says.
    ``FaultyIo``: an I/O engine with faults, for tests.
    ``BlockLayout``: where the bytes of an engine's KV blocks are.
    ``TransferQueue``: moves blocks to frames and back on worker threads.
    ``Config``: every setting.
    ``KVFerryError``, ``ConfigError``, ``ArenaError``: what it raises; more in ``kvferry.kvops.errors``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.kernels.layout import BlockLayout
    from kvferry.kvops.config import Config
    from kvferry.kvops.errors import ArenaError, ConfigError, KVFerryError
    from kvferry.kvops.store.arena import Arena
    from kvferry.kvops.store.disk.opening import open_tier
    from kvferry.kvops.store.disk.tier import DiskTier
    from kvferry.kvops.store.frames import Frames
    from kvferry.kvops.store.io_faults import FaultyIo
    from kvferry.kvops.store.store import Lookup, Reserve, Store
    from kvferry.kvops.transfer.queue import TransferQueue

__all__ = [
    "Arena",
    "ArenaError",
    "BlockLayout",
    "Config",
    "ConfigError",
    "DiskTier",
    "FaultyIo",
    "Frames",
    "KVFerryError",
    "Lookup",
    "Reserve",
    "Store",
    "TransferQueue",
    "__version__",
    "open_tier",
]

__version__ = "0.1.0"

_HOMES = {
    "Arena": "kvferry.kvops.store.arena",
    "ArenaError": "kvferry.kvops.errors",
    "BlockLayout": "kvferry.kernels.layout",
    "Config": "kvferry.kvops.config",
    "ConfigError": "kvferry.kvops.errors",
    "DiskTier": "kvferry.kvops.store.disk.tier",
    "FaultyIo": "kvferry.kvops.store.io_faults",
    "Frames": "kvferry.kvops.store.frames",
    "KVFerryError": "kvferry.kvops.errors",
    "Lookup": "kvferry.kvops.store.store",
    "Reserve": "kvferry.kvops.store.store",
    "Store": "kvferry.kvops.store.store",
    "TransferQueue": "kvferry.kvops.transfer.queue",
    "open_tier": "kvferry.kvops.store.disk.opening",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: the command line must not pay for torch."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
