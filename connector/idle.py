"""The connector of an engine whose model we can't serve: it takes part in every call and does nothing.

Models with recurrent state (Mamba and its kin) are the case: the engine would refuse to start them with a connector that
doesn't support its hybrid allocator, and starts them with this one, tier off.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class IdleMetadata(KVConnectorMetadata):
    """Says nothing."""


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores nothing and finds nothing."""

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what is stored."""
        return False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Find nothing."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Tell the worker nothing."""
        return IdleMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Let the request's blocks go at once."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def reset_cache(self) -> bool:
        """There is nothing to drop."""
        return True
