"""Bad calls raise before a byte moves: a thousand random ones at each operator, and each message once."""

import random

import pytest
import torch

from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.rows import RowLayout
from kvferry.kvops import op_schemas, ops

from . import bad_calls
from .bad_calls import HUGE, BadCalls, one_element, put

BLOCKS, PAGE, LAYERS = 6, 48, 3
ROW = PAGE * LAYERS


class BlockWorld:
    """Two groups on separate storages, blobs with headers, and a call that moves three blocks."""

    def __init__(self, name, is_load):
        self.name, self.is_load = name, is_load
        self.first = torch.randint(0, 256, (LAYERS, BLOCKS, PAGE), dtype=torch.uint8)
        self.second = torch.randint(0, 256, (BLOCKS, 32), dtype=torch.uint8)
        layouts = [
            BlockLayout.from_tensors(list(self.first), [PAGE] * LAYERS, 1),
            BlockLayout.from_tensors([self.second], [32], 1),
        ]
        self.layout = ops.register_layout(layouts)
        gone = ops.register_layout(layouts)
        self.dead_handle = gone.handle
        self.frames = torch.randint(0, 256, (1024,), dtype=torch.uint8)
        self.blobs = self.frames[:768]
        self.words = torch.randint(0, 1 << 40, (16,))
        self.flags = torch.zeros(16, dtype=torch.int32)

    def memory(self):
        return [self.first, self.second, self.frames, self.words, self.flags]

    def good(self):
        call = {
            "layout": self.layout.handle,
            "caches": [],
            "block_ids": torch.tensor([2, 5, 0]),
            "blobs": self.blobs,
            "offsets": torch.tensor([0, 160, 336]),
            "counts": [2, 1],
            "blob_ids": torch.tensor([0, 0, 1]),
            "places": torch.tensor([0, 1, 0]),
            "max_sms": 4,
            "bytes_in_flight": 1 << 16,
        }
        # what a transfer that passes would write is put last, so that its own checks come last
        results = self.results()
        return call | results

    def results(self):
        made = {"checksums": self.words[:4:2], "done": self.flags[:4:2]}
        return made | {"mismatch": self.flags[4:6]} if self.is_load else made

    def op(self, **call):
        getattr(torch.ops.kvferry, self.name)(**call)

    def calls(self):
        spoilers = bad_calls.of_layout(self.dead_handle) | bad_calls.of_budget()
        spoilers |= bad_calls.of_caches(self.layout.caches)
        for name in ("block_ids", "offsets", "blob_ids", "places"):
            spoilers |= bad_calls.of_any_tensor(name)
            spoilers[f"{name}: length"] = put(name, bad_calls.other_length)
        # the two that may be missing, but not one without the other
        for name in ("blob_ids", "places"):
            del spoilers[f"{name}: not a tensor"]
            spoilers[f"{name}: missing"] = put(name, lambda rng, old: rng.choice([None, "x", 1.5]))
        spoilers |= bad_calls.of_any_tensor("blobs")
        del spoilers["blobs: device"]
        spoilers |= {
            "block_ids: range": put("block_ids", one_element([6, -2, 1 << 30, HUGE, -HUGE])),
            "offsets: range": put(
                "offsets", one_element([-16, 768, 752, HUGE - 15, -HUGE - 1, 1 << 40])
            ),
            "offsets: alignment": put("offsets", one_element([8, 161, 337, 500])),
            "blobs: strides": put("blobs", bad_calls.strided),
            "blobs: too small": put("blobs", lambda rng, old: old[: rng.randrange(336 + 32)]),
            "blobs: misaligned": put("blobs", lambda rng, old: self.frames[1:769]),
            "blobs: the cache": put("blobs", lambda rng, old: self.layout.caches[0][:400]),
            "counts: wrong": put(
                "counts",
                lambda rng, old: rng.choice([[], [3], [2, 2], [-1, 4], [4, -1], [1, 1, 1], "x"]),
            ),
            "blob_ids: range": put("blob_ids", one_element([-1, 1 << 20, HUGE, 2])),
            "places: range": put("places", one_element([-1, 256, HUGE])),
        }
        spoilers |= self.of_results()
        if self.is_load:
            spoilers["block_ids: twice"] = put("block_ids", lambda r, old: torch.tensor([2, 2, 0]))
        else:
            spoilers["offsets: overlap"] = put(
                "offsets", lambda r, old: torch.tensor([0, 128, 336])
            )
        return BadCalls(self.op, self.good, self.memory, spoilers)

    def of_results(self):
        made = {}
        for name in self.results():
            made |= bad_calls.of_any_tensor(name)
            del made[f"{name}: not a tensor"]
            made |= {
                f"{name}: no array": put(name, lambda rng, old: rng.choice(["x", 1.5, [1.5]])),
                f"{name}: short": put(name, lambda rng, old: old[:1]),
                f"{name}: one for all": put(name, lambda rng, old: old[:1].expand(4)),
                f"{name}: in a block": put(name, lambda rng, old: self.blobs[:64].view(old.dtype)),
                f"{name}: in the cache": put(
                    name, lambda rng, old: self.second.flatten()[:64].view(old.dtype)
                ),
            }
        return made


class RowWorld:
    """A cache of two layers, five blocks of four tokens, and a call of an operator that knows tokens."""

    def __init__(self, name):
        self.name, self.is_load = name, name.startswith("scatter")
        self.cache = torch.randn(2, 5, 2, 4, 16).to(torch.bfloat16)
        rows = RowLayout.from_views(list(self.cache), "bhnc")
        self.kind = name.split("_")[1]
        if self.kind == "slots":
            register, layout = ops.register_rows, rows
            self.share = rows.row_bytes
        elif self.kind == "heads":
            register, layout = ops.register_heads, HeadRuns.from_rows(rows)
            self.share = layout.block_bytes
        else:
            register, layout = ops.register_quantized, QuantizedRows.from_rows(rows)
            self.share = layout.block_bytes
        self.layout = register(layout)
        gone = register(layout)
        self.dead_handle = gone.handle
        # a handle of another kind is as unknown as none
        self.other = ops.register_layout(
            BlockLayout.from_tensors([self.whole().view(5, -1)], [16], 1)
        )
        self.frames = torch.randint(0, 256, (4 * self.share + 64,), dtype=torch.uint8)

    def whole(self):
        return self.cache.view(-1).view(torch.uint8)

    def memory(self):
        return [self.whole(), self.frames]

    def good(self):
        call = {"layout": self.layout.handle, "caches": [], "max_sms": 4}
        if self.kind == "slots":
            rows = self.frames[: 3 * self.share].view(3, self.share)
            return call | {"slot_mapping": torch.tensor([7, 19, 0]), "rows": rows}
        offsets = torch.tensor([0, 2 * self.share + 16])
        call |= {"block_ids": torch.tensor([4, 1]), "blobs": self.frames, "offsets": offsets}
        return call | {"head_first": 0, "head_count": 1} if self.kind == "heads" else call

    def op(self, **call):
        getattr(torch.ops.kvferry, self.name)(**call)

    def calls(self):
        spoilers = bad_calls.of_layout(self.dead_handle) | bad_calls.of_caches(self.layout.caches)
        spoilers["layout: of blocks"] = put("layout", lambda rng, old: self.other.handle)
        spoilers["max_sms: range"] = bad_calls.of_budget()["max_sms: range"]
        spoilers |= self.of_slots() if self.kind == "slots" else self.of_blocks()
        return BadCalls(self.op, self.good, self.memory, spoilers)

    def of_slots(self):
        share = self.share
        made = bad_calls.of_any_tensor("slot_mapping") | bad_calls.of_any_tensor("rows")
        made |= {
            "slot_mapping: range": put("slot_mapping", one_element([20, -2, HUGE, -HUGE])),
            "slot_mapping: length": put("slot_mapping", bad_calls.other_length),
            "slot_mapping: strides": put("slot_mapping", bad_calls.strided),
            "rows: short": put("rows", lambda rng, old: old[:, :-1]),
            "rows: apart": put("rows", lambda rng, old: old[:1].expand(3, share)),
            "rows: overlap": put(
                "rows", lambda r, old: self.frames.as_strided((3, share), (16, 1))
            ),
            "rows: strides": put(
                "rows", lambda rng, old: self.frames[: 3 * share].view(share, 3).T
            ),
            "rows: the cache": put("rows", lambda r, old: self.whole()[: 3 * share].view(3, share)),
        }
        if self.is_load:
            made["slot_mapping: twice"] = put(
                "slot_mapping", lambda r, old: torch.tensor([7, 0, 7])
            )
        return made

    def of_blocks(self):
        share = self.share
        made = {}
        for name in ("block_ids", "offsets"):
            made |= bad_calls.of_any_tensor(name)
            made[f"{name}: length"] = put(name, bad_calls.other_length)
        made |= bad_calls.of_any_tensor("blobs")
        made |= {
            "block_ids: range": put("block_ids", one_element([5, -2, 1 << 30, HUGE, -HUGE])),
            "offsets: range": put(
                "offsets", one_element([-16, 3 * share + 80, HUGE - 15, -HUGE - 1, 1 << 40])
            ),
            "offsets: alignment": put("offsets", one_element([1, 2 * share + 18, 3])),
            "blobs: strides": put("blobs", bad_calls.strided),
            "blobs: too small": put("blobs", lambda rng, old: old[: rng.randrange(3 * share)]),
            "blobs: misaligned": put("blobs", lambda rng, old: self.frames[1:]),
            "blobs: the cache": put("blobs", lambda rng, old: self.whole()),
        }
        if self.kind == "heads":
            numbers = [2, -1, HUGE, "x", 1.5]
            made["head_first: range"] = put("head_first", lambda rng, old: rng.choice(numbers))
            counts = [3, -1, -HUGE, HUGE, "x", 1.5]
            made["head_count: range"] = put("head_count", lambda rng, old: rng.choice(counts))
        if self.is_load:
            made["block_ids: twice"] = put("block_ids", lambda rng, old: torch.tensor([4, 4]))
        else:
            made["offsets: overlap"] = put("offsets", lambda r, old: torch.tensor([0, share - 16]))
        return made


class SpanWorld:
    """Bytes, two spans of them, and words for their checksums."""

    def __init__(self):
        self.blobs = torch.randint(0, 256, (256,), dtype=torch.uint8)
        self.words = torch.randint(0, 1 << 40, (8,))

    def memory(self):
        return [self.blobs, self.words]

    def good(self):
        return {
            "blobs": self.blobs, "offsets": torch.tensor([0, 100]),
            "sizes": torch.tensor([64, 156]), "checksums": self.words[::2],
        }  # fmt: skip

    def op(self, **call):
        torch.ops.kvferry.checksum_blocks(**call)

    def calls(self):
        made = {}
        for name in ("blobs", "offsets", "sizes", "checksums"):
            made |= bad_calls.of_any_tensor(name)
        inside = self.blobs[8:72].view(torch.int64)
        made |= {
            "blobs: strides": put("blobs", bad_calls.strided),
            "blobs: too small": put("blobs", lambda rng, old: old[: rng.randrange(256)]),
            "offsets: length": put("offsets", bad_calls.other_length),
            "sizes: length": put("sizes", bad_calls.other_length),
            "offsets: range": put("offsets", one_element([-1, 257, 200, HUGE, -HUGE - 1])),
            "sizes: range": put("sizes", one_element([-1, 257, HUGE, -HUGE - 1])),
            "checksums: short": put("checksums", lambda rng, old: old[:1]),
            "checksums: one for all": put("checksums", lambda rng, old: old[:1].expand(4)),
            "checksums: in the bytes": put("checksums", lambda rng, old: inside),
        }
        return BadCalls(self.op, self.good, self.memory, made)


WORLDS = {
    "gather_blocks": lambda: BlockWorld("gather_blocks", is_load=False),
    "scatter_blocks": lambda: BlockWorld("scatter_blocks", is_load=True),
    **{
        name: lambda name=name: RowWorld(name)
        for name in ("gather_slots", "scatter_slots", "gather_heads", "scatter_heads",
                     "gather_quantized", "scatter_dequantized")
    },
    "checksum_blocks": SpanWorld,
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_a_thousand_random_bad_calls_raise_and_move_nothing(name):
    torch.manual_seed(0)
    calls = WORLDS[name]().calls()
    seen = calls.throw(random.Random(name), 1000)
    assert ValueError in seen


@pytest.mark.parametrize("name", WORLDS)
def test_the_call_that_is_spoilt_is_a_good_one(name):
    torch.manual_seed(0)
    world = WORLDS[name]()
    before = [tensor.clone() for tensor in world.memory()]
    world.op(**world.good())
    after = world.memory()
    assert not all(torch.equal(new, old) for new, old in zip(after, before, strict=True))


def test_every_operator_is_here():
    assert WORLDS.keys() == op_schemas.SCHEMAS.keys()
