"""Arrays of other libraries as torch tensors on the same memory; what the operators' functions share."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.utils.dlpack


class _Registered(Protocol):
    @property
    def handle(self) -> int: ...

    @property
    def caches(self) -> tuple[torch.Tensor, ...]: ...


def handle_of(layout: _Registered) -> int:
    """Return the number that stands for *layout*.

    Raises:
        ValueError: it has not been registered.
    """
    try:
        return layout.handle
    except AttributeError:
        raise ValueError(
            "layout must be what register_layout, register_rows, register_heads or "
            f"register_quantized returned; got {type(layout).__name__}"
        ) from None


def caches_of(layout: _Registered) -> Sequence[torch.Tensor]:
    """Return what a compiled graph must know of; nothing outside of one, where it only costs time."""
    return layout.caches if torch.compiler.is_compiling() else ()


def as_tensor(name: str, array: Any) -> torch.Tensor:
    """View *array* as a tensor; no byte is copied.

    Args:
        name: what an error calls it.
        array: a torch tensor; a numpy array that may be written; anything with ``__dlpack__``, such as
            a cupy array; or anything with ``__cuda_array_interface__``.

    Returns:
        *array* itself if it is a tensor. Otherwise a tensor that shares its memory and keeps it alive.
        An array of a device is ordered after the work that its library has in flight, as DLPack says;
        one with ``__cuda_array_interface__`` alone is not: that work must be done.

    Raises:
        ValueError: it is none of these, or cannot be viewed: for instance an array with
            ``__cuda_array_interface__`` alone on a device that is not the current one.
    """
    if isinstance(array, torch.Tensor):
        return array
    try:
        if isinstance(array, np.ndarray):
            if not array.flags.writeable:
                raise ValueError("it is read-only")
            return torch.from_numpy(array)
        if hasattr(array, "__dlpack__"):
            return torch.utils.dlpack.from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            view = torch.as_tensor(array, device="cuda")
            if view.data_ptr() != array.__cuda_array_interface__["data"][0]:
                raise ValueError("it is on another device than the current one")
            return view
    except (ValueError, TypeError, RuntimeError, BufferError, AssertionError) as error:
        raise ValueError(
            f"{name} must be an array that torch can view; got {type(array).__name__}: {error}"
        ) from error
    raise ValueError(
        f"{name} must be a tensor, or an array with __dlpack__ or __cuda_array_interface__; "
        f"got {type(array).__name__}"
    )
