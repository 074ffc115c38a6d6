"""What must agree before one engine may read what another one stored, read from vLLM's configuration.

The engine's block hashes cover the tokens, the cache salt, the LoRA name and images; they do not cover the weights,
the dtypes or the shape of the cache. Those are collected here; ``kvops/namespace.py`` makes 16 bytes of them. Whatever
is doubtful goes in: one field too many is a miss, one too few is a wrong byte.
"""

import dataclasses
import enum
import os
import uuid
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from kvferry.kvops.namespace import model_identity

from . import compat
from .geometry import Geometry

BLOB_FORMAT = 1
"""Version of the order of bytes in a blob: part, block in chunk, layer of the group, page."""

_CONFIG_NOISE = frozenset({"_name_or_path", "transformers_version"})
"""Entries of a model configuration that say where it came from, not what it computes."""


def namespace_fields(
    vllm_config: Any, kv_cache_config: Any, geometry: Geometry
) -> dict[str, object]:
    """Return everything that has to agree, as JSON values.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's table of KV cache groups.
        geometry: chunk sizes, as resolved for this engine.

    Raises:
        OSError: the model is a local path that cannot be read.
    """
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    fields: dict[str, object] = {
        "engine": list(compat.minor_version(compat.engine_version()) or (0, 0)),
        "model": model_identity(model.model, model.revision),
        # weights that lie elsewhere, or are made up ("dummy"), under the same name
        "model_weights": _plain(getattr(model, "model_weights", None)),
        "load_format": _plain(vllm_config.load_config.load_format),
        "load_extra": _plain(vllm_config.load_config.model_loader_extra_config),
        "model_config": _config_of(model.hf_config),
        "dtype": str(model.dtype),
        "quantization": _plain(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "kv_dtype_skip_layers": _plain(getattr(cache, "kv_cache_dtype_skip_layers", None)),
        "hash": {
            "algorithm": str(cache.prefix_caching_hash_algo),
            # the engine seeds its hashes with this when set, with a constant or something random otherwise
            "seed": os.environ.get("PYTHONHASHSEED"),
            "block_tokens": _plain(compat.hash_block_tokens(kv_cache_config)),
        },
        "layout": _plain(compat.cache_layout(vllm_config, kv_cache_config)),
        "attention": _plain(getattr(vllm_config, "attention_config", None)),
        "device": _device_kind(),
        "groups": [
            _group(kv_cache_config.kv_cache_groups[group_id]) for group_id in geometry.group_ids
        ],
        "group_ids": list(geometry.group_ids),
        "tokens_per_chunk": list(geometry.tokens_per_chunk),
        "blocks_per_chunk": geometry.blocks_per_chunk,
        "page_bytes": list(geometry.page_bytes),
        "parallel": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "prefill_context": parallel.prefill_context_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "world": parallel.world_size,
        },
        "blob_format": BLOB_FORMAT,
    }
    if vllm_config.lora_config is not None:
        # the engine knows an adapter by its name alone, and another one may get the name after a restart
        fields["lora"] = uuid.uuid4().hex
    return fields


def fresh_epoch(fields: Mapping[str, object]) -> dict[str, object]:
    """Return *fields* with something random added: nothing stored so far is found under them."""
    return {**fields, "epoch": os.urandom(16).hex()}


def _group(group: Any) -> dict[str, object]:
    specs = list(compat.layer_specs(group.kv_cache_spec))
    return {
        "layers": list(group.layer_names),
        "specs": [{"class": type(spec).__name__, "page_bytes": spec.page_size_bytes, **_fields(spec)} for spec in specs],
    }  # fmt: skip


def _fields(value: Any) -> dict[str, object]:
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _config_of(config: Any) -> object:
    """Return the model's configuration after overrides, which change what it computes (rope scaling, say)."""
    return {key: _plain(item) for key, item in config.to_dict().items() if key not in _CONFIG_NOISE}


def _device_kind() -> str:
    # the same page can hold keys and values in another order on another device
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _plain(value: Any) -> object:
    """Return *value* as a JSON value; what has no stable text of its own is named by its type."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Fraction):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(item)) for item in value)
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
