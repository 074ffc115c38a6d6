"""Correctness of gather and scatter of blocks: every layout, both homes of the frames, checksums and flags."""

import functools

import numpy as np
import torch
from perf.device.caches import caches
from perf.device.child import Context
from perf.device.correct_paths import finish, twin
from perf.device.paged import POISON
from perf.device.pairs import Pair, Transfer, frames
from perf.device.record import Case

from kvferry.kernels import gather, reference, scatter
from kvferry.kernels.cache_shapes import layout_of_views
from kvferry.kernels.table import HOLE, LayoutTable, pack_entries

SETTINGS = (
    {"max_sms": 16, "bytes_in_flight": 256 << 10},
    {"max_sms": 3, "bytes_in_flight": 12 << 10},
)
"""The default, and one in which each program has many small tiles."""
CHECKED = (
    "llama LBNHC",
    "mla 656 B and indexer 132 B",
    "hybrid, three groups",
    "padded pages, words of 8 bytes",
    "padded pages, words of 4 bytes",
)
FAR_BYTES, FAR_PAGE = 5 << 30, 1 << 20


def cases(tiny: bool) -> list[Case]:
    """Return the cases."""
    built = caches(tiny)
    made = [
        Case(f"blocks, {name}", 0, "gather and scatter", functools.partial(move, name, build))
        for name, build in built.items()
    ]
    made += [
        Case(f"checksums, {name}", 0, "written, verified, missed", functools.partial(check, name, built[name]))
        for name in (CHECKED[::4] if tiny else CHECKED)
    ]  # fmt: skip
    if not tiny:
        made.append(Case("blocks beyond 2^31 bytes", FAR_PAGE * 4, "a cache of 5 GiB", far))
    return made


def move(name: str, build, context: Context) -> None:
    """Gather, then scatter other bytes, with both settings."""
    for where in ("host",) if context.tiny else ("host", "device"):
        for number, setting in enumerate(SETTINGS[1:] if context.tiny else SETTINGS):
            pair = Pair(context, build)
            for verb, direction in (("gather_blocks", "d2h"), ("scatter_blocks", "h2d")):
                transfer = Transfer(pair, repeats=direction == "d2h")
                both = frames(context, where, transfer.nbytes, random=direction == "h2d")
                entries = transfer.entries(pair.device_table, both.device)
                launcher = gather.gather_blocks if direction == "d2h" else scatter.scatter_blocks
                launcher(pair.device_table, entries, transfer.counts, **setting)
                twin(pair, transfer, both, direction)
                what = f"{verb}, {where}, {'default' if number == 0 else 'small tiles'}"
                finish(context, f"blocks, {name}", what, both, pair)


def check(name: str, build, context: Context) -> None:
    """Checksums and done flags of a gather; a scatter that finds them right, and one that finds a flipped bit."""
    title = f"checksums, {name}"
    pair = Pair(context, build)
    transfer = Transfer(pair, repeats=False)
    both = frames(context, "host", transfer.nbytes, random=False)
    entries = transfer.entries(pair.device_table, both.device)
    # as in frame headers: a word of 8 bytes in 64, a flag of 4 behind it, in registered memory
    headers = context.once("headers", lambda: context.machine.host_memory(1 << 16)).bytes
    wanted = torch.full_like(headers, POISON)
    count = transfer.num_blobs
    fields = []
    for memory in (headers, wanted):
        memory.fill_(POISON)
        sums, done = (
            memory.view(torch.int64)[: 8 * count : 8],
            memory.view(torch.int32)[4:][: 16 * count : 16],
        )
        done.zero_()
        fields.append({"checksums": sums, "done": done})
    # all launches of this case take turns on one stream, and each leaves it as it was
    workspace = torch.zeros((count, 2), dtype=torch.int64, device=context.machine.device)
    options = {"workspace": workspace, **SETTINGS[1 if context.tiny else 0]}
    gather.gather_blocks(pair.device_table, entries, transfer.counts, **fields[0], **options)
    context.machine.synchronize()
    cpu_entries = transfer.entries(pair.cpu_table, both.cpu)
    reference.gather_blocks(pair.cpu_table, cpu_entries, transfer.counts, **fields[1])
    right = torch.equal(headers, wanted) and not bool(workspace.any())
    finish(context, title, "gather_blocks", both, pair, also=right)

    mismatch = torch.zeros(count, dtype=torch.int32, device=context.machine.device)
    expected = fields[0]["checksums"].clone().to(context.machine.device)
    for flipped in (None, 1):
        mismatch.zero_()
        context.machine.synchronize()
        if flipped is not None:
            at = transfer.offsets[
                int(np.flatnonzero((transfer.blobs == flipped) & (transfer.ids != HOLE))[0])
            ]
            for memory in (both.device, both.cpu):
                memory[at] ^= 1
        scatter.scatter_blocks(
            pair.device_table, entries, transfer.counts,
            checksums=expected, mismatch=mismatch, **options,
        )  # fmt: skip
        twin(pair, transfer, both, "h2d")
        context.machine.synchronize()
        found = torch.nonzero(mismatch.cpu()).flatten().tolist()
        what = "scatter_blocks, " + ("right" if flipped is None else "one bit flipped")
        finish(
            context, title, what, both, pair, also=found == ([] if flipped is None else [flipped])
        )


def far(context: Context) -> None:
    """Blocks whose bytes lie more than 2^31, and more than 2^32, bytes into the cache."""
    device = context.machine.device
    whole = torch.empty(FAR_BYTES, dtype=torch.uint8, device=device).view(-1, FAR_PAGE)
    ids = np.array([0, 2047, 2048, whole.shape[0] - 1])
    for block in ids:
        whole[int(block)] = torch.randint(0, 256, (FAR_PAGE,), dtype=torch.uint8, device=device)
    table = LayoutTable.from_layouts([layout_of_views([whole])])
    both = frames(context, "host", ids.size * FAR_PAGE, random=False)
    view = both.rows(ids.size, FAR_PAGE).device
    addresses = view.data_ptr() + np.arange(ids.size) * FAR_PAGE
    counts = [ids.size]
    entries = torch.from_numpy(pack_entries(table, ids, addresses, counts)).to(device)
    chosen = torch.from_numpy(ids).to(device)
    for verb in ("gather_blocks", "scatter_blocks"):
        truth = whole[chosen]
        if verb == "gather_blocks":
            gather.gather_blocks(table, entries, counts)
        else:
            truth = truth.bitwise_not()
            view.copy_(truth)
            scatter.scatter_blocks(table, entries, counts)
        context.machine.synchronize()
        right = torch.equal(view.to(device), truth) and torch.equal(whole[chosen], truth)
        context.recorder.row(
            "blocks beyond 2^31 bytes", f"{verb}, host", num_bytes=2 * truth.numel(), match=right
        )
