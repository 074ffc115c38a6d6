"""bulk.cu compiled for the host, and jobs for it: pages, frames, tables, and what must come out."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import torch

from kvferry.kernels import bulk
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.table import HOLE, LayoutTable, pack_entries

HERE = Path(__file__).parent
GUARD = 64
TILE = 1024


def build(folder, text):
    """Compile a version of the kernels for the host."""
    (folder / "bulk.cu").write_text(text)
    library = folder / "model.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{folder}"]
    made = subprocess.run(
        [*command, str(HERE / "bulk_model.cpp"), "-o", str(library)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    model = ctypes.CDLL(str(library))
    pointer, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    model.run.argtypes = [
        ctypes.c_int, pointer, pointer, pointer, u32, u32, u32, u32, u32, u64, pointer,
    ]  # fmt: skip
    model.run.restype = u32
    return model


class Job:
    """Random pages of a few groups, and a frame for each entry, in memory aligned to 64 bytes."""

    def __init__(self, groups, counts, seed=0, holes=0.2, num_blocks=5):
        self.rng = np.random.default_rng(seed)
        layouts = []
        for pages in groups:
            tensors = [self.memory(num_blocks * (page + 32)).view(num_blocks, -1) for page in pages]
            layouts.append(BlockLayout.from_tensors(tensors, pages, 1))
        self.table = LayoutTable.from_layouts(layouts)
        self.counts = counts
        total = sum(counts)
        # frames lie apart by a guard; none holds two blocks
        sizes = np.repeat(self.table.block_bytes, counts)
        self.starts = np.concatenate(([GUARD], GUARD + np.cumsum(sizes + GUARD)))[:-1]
        self.sizes = sizes
        self.frames = self.memory(int(sizes.sum()) + (total + 2) * GUARD)
        # a block twice in one scatter would be written twice: ids are distinct within a group
        ids = [self.rng.permutation(num_blocks)[:count] for count in counts]
        self.ids = np.concatenate(ids).astype(np.int64) if total else np.empty(0, np.int64)
        self.ids[self.rng.random(total) < holes] = HOLE

    def memory(self, nbytes):
        whole = torch.from_numpy(self.rng.integers(0, 256, nbytes + 64, dtype=np.uint8))
        return whole[-whole.data_ptr() % 64 :][:nbytes]

    def everything(self):
        pages = [t.clone() for layout in self.table.layouts for t in layout.tensors]
        return [*pages, self.frames.clone()]

    def expected(self, is_gather):
        """Move the bytes by plain indexing; return all memory as it must be."""
        pages = [[t.clone() for t in layout.tensors] for layout in self.table.layouts]
        frames = self.frames.clone()
        groups = np.repeat(np.arange(len(self.counts)), self.counts)
        for entry, (block, group) in enumerate(zip(self.ids, groups, strict=True)):
            at = int(self.starts[entry])
            for segment, tensor in zip(
                self.table.layouts[group].segments, pages[group], strict=True
            ):
                if block != HOLE:
                    frame = frames[at : at + segment.nbytes]
                    page = tensor[int(block), : segment.nbytes]
                    frame.copy_(page) if is_gather else page.copy_(frame)
                at += segment.nbytes
        return [*(t for group in pages for t in group), frames]

    def run(self, model, is_gather, *, stages, grid, seed=0, tile=TILE):
        """Launch as the launcher does; return the problems, the bytes loaded, the most under way."""
        addresses = (self.frames.data_ptr() + self.starts).astype(np.int64)
        entries = torch.from_numpy(pack_entries(self.table, self.ids, addresses, self.counts))
        tiles = self.table.tiles(tile)
        groups, units = bulk.group_rows(tiles, self.counts)
        reached = (ctypes.c_uint64 * 2)()
        problems = model.run(
            is_gather, entries.data_ptr(), tiles.table.data_ptr(), groups.ctypes.data,
            len(self.counts), units, stages, tile, grid, seed, reached,
        )  # fmt: skip
        return problems, reached[0], reached[1]
