"""The name of everything that must agree before stored bytes may be used again.

A blob carries the 16-byte digest of its namespace. Whoever looks it up under another one, because
the model, the dtype, the block size or anything else differs, gets a miss. What goes in is up to the
caller; this file makes one name of it, and describes the weights.

Canonical text: JSON with sorted keys, no spaces, ASCII only. The digest is XXH3-128 of it.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import xxhash

NAMESPACE_BYTES = 16
"""Length of a digest."""

MODEL_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.py")
"""Files next to ``config.json`` that decide what a model computes: weights, and code of its own."""


def describe(fields: Mapping[str, object]) -> str:
    """Return the canonical text of *fields*: equal for equal fields in any order.

    Raises:
        ValueError: *fields* is empty, or holds something that JSON cannot say exactly: keys that are
            not text, NaN, infinity, bytes, enums, numbers of other libraries. The message says where.
    """
    if not fields:
        raise ValueError("fields must name at least one thing that has to agree; got none")
    plain = _plain(fields, "fields")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def namespace_digest(fields: Mapping[str, object]) -> bytes:
    """Return the 16-byte name of *fields*.

    Raises:
        ValueError: as for `describe`.

    Example:
        >>> namespace_digest({"dtype": "bf16", "block_size": 16}).hex()
        '695a69038651c9fa48213efdabb80ee2'
    """
    return xxhash.xxh3_128_digest(describe(fields).encode("ascii"))


def model_identity(
    path_or_name: str, revision: str | None = None, *, hub_cache: str | None = None
) -> dict[str, object]:
    """Say which weights a model name stands for, without reading them.

    A local folder or file is described by the bytes of its ``config.json`` and by the name, size and
    time of change of every weight file, so that a model that was trained further or moved away and
    replaced has another identity, while a folder that was only renamed keeps its own. Any other name
    is described by itself, its revision and, where the download cache knows it, the commit that the
    revision stands for now.

    Args:
        path_or_name: what the engine was given.
        revision: branch, tag or commit, as given; None is the hub's default.
        hub_cache: folder of downloaded models; None follows ``HF_HUB_CACHE`` and ``HF_HOME``.

    Returns:
        JSON values only, for `namespace_digest`.

    Raises:
        OSError: a local path exists and cannot be read.
    """
    path = Path(path_or_name)
    if not path.exists():
        commit = _commit(path_or_name, revision or "main", hub_cache)
        return {"model": path_or_name, "revision": revision, "commit": commit}
    folder = path if path.is_dir() else path.parent
    files = {path} if path.is_file() else {f for p in MODEL_FILES for f in folder.glob(p)}
    config = folder / "config.json"
    identity: dict[str, object] = {
        "config": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None,
        "files": [_file(file) for file in sorted(files)],
    }
    if not files:
        # nothing to tell two folders apart by: the path has to do it
        identity["path"] = str(path.resolve())
    return identity


def _file(path: Path) -> list[object]:
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]


def _commit(name: str, revision: str, hub_cache: str | None) -> str | None:
    if hub_cache is None:
        home = os.environ.get("HF_HOME") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
        )
        hub_cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    folder = "models--" + name.replace("/", "--")
    try:
        return (Path(hub_cache) / folder / "refs" / revision).read_text("ascii").strip()
    except (OSError, ValueError):
        return None


def _plain(value: object, where: str) -> object:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise ValueError(f"{where} must have text keys; got {key!r}")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ValueError(
        f"{where} must be a JSON value (text, finite number, boolean, null, list or object); "
        f"got {value!r:.80} (a {type(value).__name__})"
    )
