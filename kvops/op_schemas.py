"""The schemas of ``torch.ops.kvferry.*``: what each operator takes, and what it writes.

They are made with ``torch.library.Library``: a call through ``torch.library.custom_op`` costs ten times
as much. Nothing is returned; what an operator writes is marked in its schema, so a compiled graph
neither drops it nor moves it past a reader.

``caches`` may stay empty in eager code. In a compiled graph it is the only thing that tells which memory
is read or written, so tracing refuses an empty one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.library import Library, fallthrough_kernel, register_fake

from kvferry.kernels.budget import BYTES_IN_FLIGHT, MAX_SMS

NAMESPACE = "kvferry"

_BUDGET = f"int max_sms={MAX_SMS}, int bytes_in_flight={BYTES_IN_FLIGHT}"
_ENTRIES = "Tensor offsets, int[] counts=[], Tensor? blob_ids=None, Tensor? places=None"

SCHEMAS = {
    "gather_blocks": (
        "(int layout, Tensor[] caches, Tensor block_ids, Tensor(a!) blobs, "
        f"{_ENTRIES}, Tensor(b!)? checksums=None, Tensor(c!)? done=None, {_BUDGET}) -> ()"
    ),
    "scatter_blocks": (
        "(int layout, Tensor(a!)[] caches, Tensor block_ids, Tensor blobs, "
        f"{_ENTRIES}, Tensor? checksums=None, Tensor(b!)? mismatch=None, Tensor(c!)? done=None, "
        f"{_BUDGET}) -> ()"
    ),
    "gather_slots": (
        "(int layout, Tensor[] caches, Tensor slot_mapping, Tensor(a!) rows, "
        f"int max_sms={MAX_SMS}) -> ()"
    ),
    "scatter_slots": (
        "(int layout, Tensor(a!)[] caches, Tensor slot_mapping, Tensor rows, "
        f"int max_sms={MAX_SMS}) -> ()"
    ),
    "gather_heads": (
        "(int layout, Tensor[] caches, Tensor block_ids, Tensor(a!) blobs, Tensor offsets, "
        f"int head_first=0, int? head_count=None, int max_sms={MAX_SMS}) -> ()"
    ),
    "scatter_heads": (
        "(int layout, Tensor(a!)[] caches, Tensor block_ids, Tensor blobs, Tensor offsets, "
        f"int head_first=0, int? head_count=None, int max_sms={MAX_SMS}) -> ()"
    ),
    "gather_quantized": (
        "(int layout, Tensor[] caches, Tensor block_ids, Tensor(a!) blobs, Tensor offsets, "
        f"int max_sms={MAX_SMS}) -> ()"
    ),
    "scatter_dequantized": (
        "(int layout, Tensor(a!)[] caches, Tensor block_ids, Tensor blobs, Tensor offsets, "
        f"int max_sms={MAX_SMS}) -> ()"
    ),
    "checksum_blocks": "(Tensor blobs, Tensor offsets, Tensor sizes, Tensor(a!) checksums) -> ()",
}
"""Name and schema of every operator."""

_LIBRARY = Library(NAMESPACE, "FRAGMENT")


def define(name: str, implementation: Callable[..., None]) -> Callable[..., None]:
    """Make and return ``torch.ops.kvferry.<name>`` from its schema and one function for every device.

    The function looks at its layout for the device: blobs and ids may be in host memory while the
    cache is not, and an operator without ``caches`` has nothing else on the cache's device.
    """
    _LIBRARY.define(name + SCHEMAS[name])
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
        # bytes have no gradient: looking for one in every argument costs as much as the rest of a call
        _LIBRARY.impl(name, fallthrough_kernel, f"Autograd{key}")
    takes_caches = "caches" in SCHEMAS[name]
    fake = _fake_with_caches if takes_caches else _fake
    register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    made: Callable[..., None] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return made


def _fake(*arguments: object, **keywords: object) -> None:
    """Trace an operator: nothing is returned."""
    are_meta = {
        value.device.type == "meta"
        for value in _flatten((*arguments, *keywords.values()))
        if isinstance(value, torch.Tensor)
    }
    if len(are_meta) > 1:
        # one of them is enough to come here instead of to a move
        raise ValueError("tensors must be all on meta or none; got some on meta")


def _flatten(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _fake_with_caches(
    layout: int, caches: Sequence[torch.Tensor], *arguments: object, **keywords: object
) -> None:
    """Trace an operator on a layout: nothing is returned."""
    if not caches:
        raise ValueError("caches must be the layout's `caches` in a compiled graph; got none")
    _fake(layout, caches, *arguments, **keywords)
