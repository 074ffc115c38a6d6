"""What a strided view is made of, as bytes: contiguous runs, and whether any two elements share one."""

from collections.abc import Iterable, Mapping, Sequence

import torch

Views = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""Tensors of one KV cache group in its order; errors name them by key, or by index."""


def named(what: str, views: Views) -> list[tuple[str, torch.Tensor]]:
    """Return each view with the name that errors call it by: ``what['key']`` or ``what[index]``.

    Raises:
        ValueError: there are none, *views* is a tensor itself, or one is not a dense tensor with memory.
    """
    given: object = views
    if isinstance(given, torch.Tensor):
        # it would be taken apart along its first axis, whatever that counts
        raise ValueError(
            f"{what} must be a sequence of tensors, one for each; got one tensor alone"
        )
    pairs: Iterable[tuple[object, torch.Tensor]]
    pairs = views.items() if isinstance(views, Mapping) else enumerate(views)
    found = [(f"{what}[{key!r}]", view) for key, view in pairs]
    if not found:
        raise ValueError(f"{what} must be at least one tensor; got none")
    for name, view in found:
        check_dense(name, view)
    return found


def describe(view: torch.Tensor) -> str:
    """Say what *view* is, for the end of an error message."""
    return f"{view.dtype} {list(view.shape)} with strides {list(view.stride())} on {view.device}"


def check_dense(name: str, view: torch.Tensor) -> None:
    """Raise a ValueError that names the view unless it is strided, has memory, and is not empty."""
    if not isinstance(view, torch.Tensor):
        raise ValueError(f"{name} must be a tensor; got {type(view).__name__}")
    if view.layout is not torch.strided or view.device.type == "meta":
        raise ValueError(f"{name} must be a dense tensor with memory; got {view.layout}")
    if not view.numel():
        raise ValueError(f"{name} must not be empty; got {describe(view)}")


def check_distinct(name: str, view: torch.Tensor) -> None:
    """Raise a ValueError that names the view if two of its elements could share a byte.

    Axes must nest: in order of their strides, each steps over all that the smaller ones span. Every
    cache is like that; a view that is not is taken for one that overlaps itself.
    """
    span = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size == 1:
            continue
        if stride < span:
            raise ValueError(f"{name} must not overlap itself; got {describe(view)}")
        span = stride * (size - 1) + span


def contiguous_runs(
    sizes: Sequence[int], byte_strides: Sequence[int], element_bytes: int
) -> tuple[list[int], int]:
    """Split a strided box into contiguous runs of equal length.

    Args:
        sizes: of the axes, outermost first: the order in which runs come.
        byte_strides: of the same axes.
        element_bytes: bytes of one element.

    Returns:
        The byte offset of each run from the first element, in the order of the axes, and the bytes
        of one run.
    """
    axes = list(zip(sizes, byte_strides, strict=True))
    nbytes = element_bytes
    while axes and axes[-1][1] == nbytes:
        nbytes *= axes.pop()[0]
    offsets = [0]
    for size, step in axes:
        offsets = [offset + i * step for offset in offsets for i in range(size)]
    return offsets, nbytes
