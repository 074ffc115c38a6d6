"""The module that vLLM users name: ``"kv_connector_module_path": "kvferry.vllm"``.

Importing it is cheap and needs no vLLM; the classes are made when they are first asked for.
"""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.connector.spec import KVFerrySpec
    from kvferry.connector.vllm_connector import KVFerryConnector

__all__ = ["KVFerryConnector", "KVFerrySpec", "register"]


def register() -> None:
    """Make ``"kv_connector": "KVFerryConnector"`` known to vLLM.

    vLLM calls it in each of its processes (entry point ``vllm.general_plugins``), possibly more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVFerryConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KVFerryConnector", "kvferry.vllm", "KVFerryConnector"
        )


def __getattr__(name: str) -> Any:
    """Import a class of the connector, after checking that this vLLM is one that it knows.

    Raises:
        UnsupportedEngineError: vLLM is too old, or too new in a way that matters.
    """
    if name not in ("KVFerryConnector", "KVFerrySpec"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_engine()
    from kvferry.connector import spec, vllm_connector

    return vllm_connector.KVFerryConnector if name == "KVFerryConnector" else spec.KVFerrySpec


@functools.cache
def _check_engine() -> None:
    """Refuse an engine that can't be served; say once that one is newer than those tested."""
    from kvferry.connector import compat

    compat.require_supported_engine()
