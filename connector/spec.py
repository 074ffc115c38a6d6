"""The spec that vLLM's offloading connector asks for its two halves. Runs in scheduler and worker processes.

vLLM hands a spec its offloading configuration only; what else it needs (settings, namespace, the KV cache table) comes
from KVFerryConnector through `handing_over`, which is why the spec works under that connector alone.
"""

import contextlib
import contextvars
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingSpec

from kvferry.kernels.layout import BlockLayout
from kvferry.kvops.config import Config, format_bytes
from kvferry.kvops.errors import UnsupportedEngineError
from kvferry.kvops.namespace import namespace_digest
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.disk.opening import open_tier
from kvferry.kvops.store.frames import Frames
from kvferry.kvops.store.private_arena import private_arena_path, sweep_private_arenas
from kvferry.kvops.store.store import Store
from kvferry.kvops.transfer.queue import TransferQueue

from .disk import Disk
from .geometry import check_part_bytes, read_geometry
from .scheduler import KVFerryManager
from .stats import metric_definitions
from .vllm_namespace import fresh_epoch, namespace_fields
from .worker import KVFerryWorker

logger = logging.getLogger("vllm.kvferry")

SPEC_NAME = "KVFerrySpec"
SPEC_MODULE = "kvferry.vllm"


@dataclass(frozen=True, slots=True)
class Handover:
    """What KVFerryConnector knows and vLLM does not pass on."""

    config: Config
    vllm_config: Any
    kv_cache_config: Any


_handover: contextvars.ContextVar[Handover | None] = contextvars.ContextVar(
    "kvferry_handover", default=None
)


@contextlib.contextmanager
def handing_over(handover: Handover) -> Iterator[None]:
    """Let a spec that is made inside find *handover*."""
    token = _handover.set(handover)
    try:
        yield
    finally:
        _handover.reset(token)


class KVFerrySpec(OffloadingSpec):
    """Makes the scheduler's half and the worker's half, each with its own mapping of the arena.

    Raises:
        UnsupportedEngineError: it was not made by KVFerryConnector.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        handover = _handover.get()
        if handover is None:
            raise UnsupportedEngineError(
                f'{SPEC_NAME} needs what only its own connector knows: set "kv_connector" to "KVFerryConnector" with '
                f'"kv_connector_module_path" "{SPEC_MODULE}", and leave spec_name out'
            )
        self._settings = handover.config
        self.geometry = read_geometry(
            handover.vllm_config,
            handover.kv_cache_config,
            self.blocks_per_chunk,
            self.tokens_per_block,
        )
        self._fields = namespace_fields(
            handover.vllm_config, handover.kv_cache_config, self.geometry
        )
        self.manager: KVFerryManager | None = None
        self.worker: KVFerryWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """Declare our metrics to vLLM."""
        return metric_definitions()

    def get_manager(self) -> KVFerryManager:
        """Open the store and return the scheduler's half. Called once, after the workers have attached.

        Raises:
            ArenaError: the arena can't be had; the message says why.
        """
        if self.manager is None:
            settings = self._settings
            arena = self._open_arena()
            try:
                namespace = self._first_namespace()
                store = Store.open(
                    arena,
                    namespace=namespace,
                    parts=self.geometry.world_size,
                    verify=settings.verify,
                    eviction=settings.eviction,
                )
                if settings.arena_path is None:
                    # everybody has it mapped; without a name it can't outlive its processes
                    arena.unlink()
                # last: behind it runs a thread that uses the arena
                disk = self._open_disk(store)
            except BaseException:
                arena.close()
                raise
            self.manager = KVFerryManager(
                store, self.geometry, settings, self._next_namespace, disk, arena.close
            )
            self._announce(arena, namespace)
        return self.manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> KVFerryWorker:
        """Attach to the arena and return the worker's half for these tensors. Called once.

        Raises:
            ArenaError: the arena can't be had; the message says why.
            UnsupportedEngineError: the tensors are not what the engine's table says.
        """
        if self.worker is None:
            settings, rank = self._settings, self.config.parallel.rank
            layouts = [
                BlockLayout.from_tensors(
                    [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs],
                    [ref.page_size_bytes for ref in refs],
                    self.blocks_per_chunk,
                )
                for refs in kv_caches.group_data_refs
            ]
            found = tuple(layout.part_bytes for layout in layouts)
            check_part_bytes(self.geometry.part_bytes, found, rank)
            arena = self._open_arena()
            try:
                arena.attach()
                frames = Frames(arena, rank, verify=settings.verify)
                queue = TransferQueue.on_host(
                    layouts, frames,
                    max_inflight_bytes=settings.max_inflight_bytes, threads=settings.transfer_threads,
                )  # fmt: skip
            except BaseException:
                arena.close()
                raise
            self.worker = KVFerryWorker(queue, frames, self.geometry, on_shutdown=arena.close)
        return self.worker

    def _open_arena(self) -> Arena:
        settings, engine_id = self._settings, self.config.engine_id
        path = settings.arena_path or private_arena_path(engine_id)
        if settings.arena_path is None:
            # an engine that died, or gave up, before everybody had its arena mapped left the file
            for left in sweep_private_arenas():
                logger.warning("kvferry: removed %s, which an engine that did not start left", left)
        return Arena.open(path, settings.arena_bytes, session=engine_id)

    def _open_disk(self, store: Store) -> Disk | None:
        settings = self._settings
        if settings.disk_path is None:
            return None
        if not settings.pending_timeout_ms:
            logger.warning("disk_path is written to but never read from: pending_timeout_ms is 0")
        try:
            tier = open_tier(store, settings)
        except OSError as error:
            # full or failing, which is no reason to serve nobody
            logger.error("disk_path %s: %s; going on with memory alone", settings.disk_path, error)
            return None
        stats = tier.stats()
        logger.info(
            "kvferry: disk %s: %d chunks (%s) found, %s of %s in use; written %s, %s; sync %s; I/O by %s",
            settings.disk_path, stats["blobs"], format_bytes(stats["blob_bytes"]), format_bytes(stats["used_bytes"]),
            format_bytes(settings.disk_bytes), f"on {settings.disk_write}",
            "all of them" if settings.disk_admission == "all" else "if they come a second time",
            settings.disk_sync, tier.io_name,
        )  # fmt: skip
        return Disk(tier, store)

    def _first_namespace(self) -> bytes:
        return namespace_digest(self._fields)

    def _next_namespace(self) -> bytes:
        return namespace_digest(fresh_epoch(self._fields))

    def _announce(self, arena: Arena, namespace: bytes) -> None:
        settings, geometry = self._settings, self.geometry
        groups = ", ".join(
            f"{tokens} tokens = {format_bytes(size)}"
            for tokens, size in zip(geometry.tokens_per_chunk, geometry.part_bytes, strict=True)
        )
        logger.info(
            "kvferry: arena %s of %s in %s; %d KV cache groups (a chunk of each, per rank: %s), %d ranks, layout %s; "
            "verify %s; namespace %s",
            "private to this engine" if settings.arena_path is None else "kept between engines",
            format_bytes(arena.arena_bytes), arena.name, len(geometry.group_ids), groups, geometry.world_size,
            self.config.kv_cache_layout, settings.verify, namespace.hex(),
        )  # fmt: skip
