"""Bad calls raise before a byte moves: a thousand random ones at each operator, and each message once."""

import random

import pytest
import torch

from kvferry.kernels.layout import BlockLayout
from kvferry.kvops import ops

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
        return {"done": self.flags[:4:2]}

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


WORLDS = {
    "gather_blocks": lambda: BlockWorld("gather_blocks", is_load=False),
    "scatter_blocks": lambda: BlockWorld("scatter_blocks", is_load=True),
}


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
