"""Memory by address, for the twins: bytes of the tensors that a layout keeps alive."""

from collections.abc import Sequence

import torch


def bytes_of(tensors: Sequence[torch.Tensor], address: int, nbytes: int) -> torch.Tensor:
    """View bytes of the storage, of any device, that *address* lies in.

    Returns:
        ``[nbytes]`` uint8; writing to it writes to the tensors.

    Raises:
        ValueError: no tensor's storage has these bytes.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = address - storage.data_ptr()
        if start >= 0 and start + nbytes <= storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            return whole[start : start + nbytes]
    raise ValueError(f"address must lie in one of the tensors; got {address}")
