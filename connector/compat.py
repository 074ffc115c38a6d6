"""Differences between vLLM versions. No other file of this folder looks at the version.

Supported: 0.30 to 0.33. A newer vLLM is tried, with one warning, if the interface we stand on looks as it did in the
newest of these; an older one is refused.
"""

import importlib.util
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvferry.kvops.errors import UnsupportedEngineError

from . import signatures

logger = logging.getLogger("vllm.kvferry")

OLDEST = (0, 30)
NEWEST = (0, 33)


def supported_range() -> str:
    """Return the supported versions as a sentence says them."""
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def engine_version() -> str:
    """Return the version text of the installed vLLM, such as ``"0.32.0+cpu"``."""
    from vllm import version

    return str(getattr(version, "__version__"))  # noqa: B009  # set from a file that a build makes


def minor_version(text: str) -> tuple[int, int] | None:
    """Return (major, minor) of a version text, or None for one without numbers, such as ``"dev"``."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def require_supported_engine(version: str | None = None, package: Path | None = None) -> None:
    """Refuse an engine whose interface we don't know.

    Args:
        version: the engine's version text; None asks the installed one.
        package: folder of the ``vllm`` package, to read signatures from; None finds the installed one.

    Raises:
        UnsupportedEngineError: it is too old, or newer with another interface.
    """
    version = engine_version() if version is None else version
    minor = minor_version(version)
    if minor is not None and minor < OLDEST:
        raise UnsupportedEngineError(
            f"vLLM must be {supported_range()} for kvferry; got {version}: install a newer vLLM"
        )
    if minor is not None and minor <= NEWEST:
        return
    if package is None:
        spec = importlib.util.find_spec("vllm")
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            raise UnsupportedEngineError("vLLM is not installed; kvferry.vllm needs it")
        package = Path(places[0])
    newest = ".".join(map(str, NEWEST))
    wrong = signatures.differences(
        signatures.recorded()[newest], signatures.read_signatures(package)
    )
    if wrong:
        raise UnsupportedEngineError(
            f"vLLM must be {supported_range()} for kvferry; got {version}, whose offloading interface differs: "
            f"{wrong[0]}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
        )
    logger.warning(
        "vLLM %s is newer than what this kvferry was tested with (%s); its offloading interface looks the same, going on",
        version, supported_range(),
    )  # fmt: skip


def share_log() -> None:
    """Let what the parts below have to say appear where vLLM's own lines do, unless somebody arranged it otherwise."""
    ours, engines = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if not ours.handlers and ours.propagate:
        for handler in engines.handlers:
            ours.addHandler(handler)
        ours.setLevel(engines.level)
        # and not twice
        ours.propagate = not engines.handlers


def hit_sources() -> tuple[Any, Any]:
    """Return what `get_load_source` answers for memory of this host and for its disk; None before vLLM 0.32."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None, None
    return CacheHitSource.HOST, CacheHitSource.DISK


def key_positions(context: Any) -> dict[bytes, int] | None:
    """Return the end token of every chunk of a request by key, or None before vLLM 0.31."""
    positions: dict[bytes, int] | None = getattr(context, "_offload_key_positions", None)
    return positions


def has_forward(forward_context: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether the step that calls `start_load_kv` computes anything; if in doubt, it does."""
    scheduled = getattr(arguments.get("scheduler_output"), "total_num_scheduled_tokens", None)
    if scheduled is not None:
        return bool(scheduled)
    return getattr(forward_context, "attn_metadata", True) is not None


def cacheable_group_ids(kv_cache_config: Any) -> tuple[int, ...]:
    """Return the ids of the KV cache groups that vLLM offloads, as the connector of this version counts them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config

    return tuple(config.get_offloading_group_ids(kv_cache_config))


def layer_specs(kv_cache_spec: Any) -> Collection[Any]:
    """Return the specs of a group's layers: one for each layer where they differ, else one for all."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    specs: Collection[Any] = iter_layer_specs(kv_cache_spec)
    return specs


def hash_block_tokens(kv_cache_config: Any) -> int | None:
    """Return the tokens of one block hash; None before vLLM 0.31, where they follow from the groups' block sizes."""
    tokens: int | None = getattr(kv_cache_config, "hash_block_size", None)
    return tokens


def cache_layout(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return the name of the cache's layout, from wherever this version keeps it."""
    name: str | None = getattr(kv_cache_config, "kv_cache_layout", None)
    return name or getattr(vllm_config.cache_config, "kv_cache_layout", None)
