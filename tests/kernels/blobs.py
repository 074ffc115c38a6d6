"""Blobs of the moves of heads and of quantised rows: poisoned, with guards, and the entries that name them."""

import torch

from kvferry.kernels.table import BLOCK_MASK

from .layouts import GUARD


class Blobs:
    """Poisoned blobs with guards on both sides, and entries that name them."""

    def __init__(self, poisoned, count, block_bytes, device):
        self.whole = poisoned(count * block_bytes + 2 * GUARD, device=device)
        self.rows = self.whole[GUARD:-GUARD].view(count, block_bytes)

    def entries(self, block_ids):
        ids = torch.tensor(block_ids, dtype=torch.int64) & BLOCK_MASK
        # what other kernels keep in the upper bits is not ours to read
        ids |= torch.arange(len(block_ids)) << 28
        addresses = torch.tensor([row.data_ptr() for row in self.rows], dtype=torch.int64)
        return torch.stack([ids, addresses], dim=1).to(self.whole.device)
