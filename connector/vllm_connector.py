"""The class vLLM loads: its own OffloadingConnector with the spec filled in and load failures reported.

Scheduler and worker processes; the module is also imported where the API server runs. Nothing here touches CUDA.
Hooks added to vLLM's, in call order: the constructor; worker side start_load_kv, get_transfer_results,
get_block_ids_with_load_errors, get_kv_connector_stats; get_handshake_metadata and set_xfer_handshake_metadata once.
"""

import logging
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvferry.kvops.config import Config
from kvferry.kvops.errors import ConfigError

from . import compat
from .geometry import has_state_groups
from .idle import IdleConnector
from .messages import WorkerGeometry
from .spec import SPEC_MODULE, SPEC_NAME, Handover, KVFerrySpec, handing_over
from .stats import forget_earlier_engines
from .worker import KVFerryWorker

logger = logging.getLogger("vllm.kvferry")

CONNECTOR_NAME = "KVFerryConnector"


class KVFerryConnector(OffloadingConnector):
    """vLLM's offloading connector on a kvferry store.

    Raises:
        ConfigError: a setting is not usable; the engine does not start.
        ArenaError: the arena can't be had; the engine does not start.
    """

    def __new__(cls, vllm_config: Any, role: Any, kv_cache_config: Any) -> Any:
        """Make an idle connector for a model that can't be served yet."""
        if not has_state_groups(kv_cache_config):
            return super().__new__(cls)
        read_settings(vllm_config.kv_transfer_config)
        # once, not again for each rank
        if role is KVConnectorRole.SCHEDULER:
            logger.warning(
                "kvferry is OFF: this model keeps recurrent state (Mamba or the like), which kvferry does not store yet; "
                "the engine runs as if it had no connector"
            )
        return IdleConnector(vllm_config, role, kv_cache_config)

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer_config = vllm_config.kv_transfer_config
        settings = read_settings(transfer_config)
        _fill_in_spec(transfer_config)
        if len(kv_cache_config.kv_cache_groups) > 1:
            _forbid_loads_within_a_step(transfer_config)
        transfer_config.kv_load_failure_policy = settings.on_load_failure
        with handing_over(Handover(settings, vllm_config, kv_cache_config)):
            super().__init__(vllm_config, role, kv_cache_config)
        # vLLM makes one half and leaves the other out
        worker: Any = self.connector_worker
        scheduler: Any = self.connector_scheduler
        self._spec: KVFerrySpec | None = worker.spec if worker is not None else None
        self._manager: Any = scheduler.manager if scheduler is not None else None
        self._request_of_load: dict[int, str] = {}
        self._computes = True

    @property
    def _worker_spec(self) -> KVFerrySpec:
        assert self._spec is not None, "the scheduler's half was asked for the worker's"
        return self._spec

    @property
    def _worker(self) -> KVFerryWorker:
        worker = self._worker_spec.worker
        assert worker is not None, "no KV cache has been registered yet"
        return worker

    # --- worker side -------------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's transfers, and note which request each load belongs to."""
        metadata: Any = self._connector_metadata
        for job_id, job in metadata.load_jobs.items():
            self._request_of_load[job_id] = job.req_id
        self._computes = compat.has_forward(forward_context, kwargs)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return finished loads; of models with several KV cache groups also which of them failed."""
        if not self._computes:
            # an engine that only waits for loads would step without end, and keep them from the interpreter
            self._worker.give_way()
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            # taken in any case, so that they don't pile up
            failed_jobs = self._worker.take_failed_jobs()
            if not self._worker_spec.geometry.is_single_group:
                failed = {self._request_of_load[job_id] for job_id in failed_jobs}
                results.failed_recving |= failed & results.finished_recving
            self._request_of_load = {
                job_id: request_id
                for job_id, request_id in self._request_of_load.items()
                if self._worker.is_loading(job_id)
            }
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of failed loads, for models with one KV cache group."""
        failed: set[int] = self._worker.take_failed_blocks()
        return failed if self._worker_spec.geometry.is_single_group else set()

    def get_handshake_metadata(self) -> WorkerGeometry | None:
        """Tell the scheduler's half the sizes that it can't know: where layers of one group differ."""
        if self._worker_spec.geometry.has_mixed_pages:
            return WorkerGeometry(self._worker_spec.geometry.part_bytes)
        return None

    # --- scheduler side ----------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        """Take the sizes that the workers found."""
        for found in metadata.values():
            if isinstance(found, WorkerGeometry):
                self._manager.adopt_part_bytes(found.part_bytes)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Let the disk go on in a step that computes nothing, then do what vLLM does."""
        if not scheduler_output.total_num_scheduled_tokens:
            self._manager.give_way()
        return super().build_connector_meta(scheduler_output)

    # --- both sides --------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Any:
        """Return what this half counted since the last step."""
        if self.connector_worker is not None:
            worker = self._worker_spec.worker
            return None if worker is None else worker.report()
        return super().get_kv_connector_stats()

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Declare the metrics where the API server runs."""
        _fill_in_spec(vllm_config.kv_transfer_config)
        forget_earlier_engines()
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def read_settings(transfer_config: Any) -> Config:
    """Read and check everything the user wrote.

    Raises:
        ConfigError: naming the key, what was expected and what came.
    """
    extra = transfer_config.kv_connector_extra_config
    settings = Config.read(extra)
    spec_name = extra.get("spec_name", SPEC_NAME)
    if spec_name != SPEC_NAME:
        raise ConfigError(
            f"spec_name must be left out, or {SPEC_NAME!r}, with {CONNECTOR_NAME}; got {spec_name!r}"
        )
    if extra.get("canonical_layout"):
        raise ConfigError(
            "canonical_layout must be false: kvferry stores each rank's bytes as they are, and does not rearrange them "
            "for other parallel sizes yet"
        )
    return settings


def _fill_in_spec(transfer_config: Any) -> None:
    extra = transfer_config.kv_connector_extra_config
    extra["spec_name"], extra["spec_module_path"] = SPEC_NAME, SPEC_MODULE


def _forbid_loads_within_a_step(transfer_config: Any) -> None:
    # a load that a step waits for has no way to fail in a model with several KV cache groups
    extra = transfer_config.kv_connector_extra_config
    if extra.get("sync_load_budget_bytes"):
        logger.warning("sync_load_budget_bytes is ignored: this model has several KV cache groups")
        extra["sync_load_budget_bytes"] = 0


def register() -> None:
    """Make ``"kv_connector": "KVFerryConnector"`` known to vLLM. May be called more than once."""
    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, SPEC_MODULE, CONNECTOR_NAME)


# vLLM's MultiConnector finds the class of a child's statistics by name alone, also when it was loaded by module path
register()
compat.share_log()

__all__ = ["CONNECTOR_NAME", "KVFerryConnector", "read_settings", "register"]
