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
    ``RowLayout``, ``HeadRuns``, ``QuantizedRows``: where its tokens, heads and numbers are.
    ``register_layout``, ``register_rows``, ``register_heads``, ``register_quantized``: make a layout known
        to the operators ``torch.ops.kvferry.*``, which are also functions here:
    ``gather_blocks``, ``scatter_blocks``: whole blocks of all layers and groups, to blobs and back.
    ``gather_slots``, ``scatter_slots``: single tokens, to rows and back.
    ``gather_heads``, ``scatter_heads``: heads, to blobs of any number of ranks and back.
    ``gather_quantized``, ``scatter_dequantized``: blocks, to fp8 codes and scales and back.
    ``checksum_blocks``: the checksums of blobs.
    ``layout_of_views``: a ``BlockLayout`` from cache tensors of any shape.
    ``model_kv``: keys and values, or latents, of tokens, as the model knows them.
    ``TransferQueue``: moves blocks to frames and back on worker threads.
    ``Config``: every setting.
    ``KVFerryError``, ``ConfigError``, ``ArenaError``: what it raises; more in ``kvferry.kvops.errors``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.kernels.cache_shapes import layout_of_views
    from kvferry.kernels.head_runs import HeadRuns
    from kvferry.kernels.layout import BlockLayout
    from kvferry.kernels.quantized_rows import QuantizedRows
    from kvferry.kernels.rows import RowLayout
    from kvferry.kvops.config import Config
    from kvferry.kvops.errors import ArenaError, ConfigError, KVFerryError
    from kvferry.kvops.model_kv import model_kv
    from kvferry.kvops.ops import (
        checksum_blocks,
        gather_blocks,
        gather_heads,
        gather_quantized,
        gather_slots,
        register_heads,
        register_layout,
        register_quantized,
        register_rows,
        scatter_blocks,
        scatter_dequantized,
        scatter_heads,
        scatter_slots,
    )
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
    "HeadRuns",
    "KVFerryError",
    "Lookup",
    "QuantizedRows",
    "Reserve",
    "RowLayout",
    "Store",
    "TransferQueue",
    "__version__",
    "checksum_blocks",
    "gather_blocks",
    "gather_heads",
    "gather_quantized",
    "gather_slots",
    "layout_of_views",
    "model_kv",
    "open_tier",
    "register_heads",
    "register_layout",
    "register_quantized",
    "register_rows",
    "scatter_blocks",
    "scatter_dequantized",
    "scatter_heads",
    "scatter_slots",
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
    "HeadRuns": "kvferry.kernels.head_runs",
    "KVFerryError": "kvferry.kvops.errors",
    "Lookup": "kvferry.kvops.store.store",
    "QuantizedRows": "kvferry.kernels.quantized_rows",
    "Reserve": "kvferry.kvops.store.store",
    "RowLayout": "kvferry.kernels.rows",
    "Store": "kvferry.kvops.store.store",
    "TransferQueue": "kvferry.kvops.transfer.queue",
    "checksum_blocks": "kvferry.kvops.ops",
    "gather_blocks": "kvferry.kvops.ops",
    "gather_heads": "kvferry.kvops.ops",
    "gather_quantized": "kvferry.kvops.ops",
    "gather_slots": "kvferry.kvops.ops",
    "layout_of_views": "kvferry.kernels.cache_shapes",
    "model_kv": "kvferry.kvops.model_kv",
    "open_tier": "kvferry.kvops.store.disk.opening",
    "register_heads": "kvferry.kvops.ops",
    "register_layout": "kvferry.kvops.ops",
    "register_quantized": "kvferry.kvops.ops",
    "register_rows": "kvferry.kvops.ops",
    "scatter_blocks": "kvferry.kvops.ops",
    "scatter_dequantized": "kvferry.kvops.ops",
    "scatter_heads": "kvferry.kvops.ops",
    "scatter_slots": "kvferry.kvops.ops",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: the command line must not pay for torch."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
