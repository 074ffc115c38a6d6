"""Random bad calls: a call that is right, and ways to spoil each of its arguments.

A call is the keywords of an operator. A spoiler takes a random generator and the call, and changes the
call so that it is wrong whatever else is wrong with it. Spoilers are named ``argument: what``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

HUGE = (1 << 63) - 1


@dataclass
class BadCalls:
    """An operator, a maker of good calls, and the ways to spoil them.

    Attributes:
        op: the operator.
        good: returns the keywords of a call that is right.
        memory: every byte that a call may reach.
        spoilers: name -> function of (generator, call).
    """

    op: Callable
    good: Callable[[], dict]
    memory: Callable[[], list[torch.Tensor]]
    spoilers: dict[str, Callable] = field(default_factory=dict)

    def throw(self, rng, count=1000):
        """Make *count* bad calls; each must raise and leave every byte as it was."""
        before = [tensor.clone() for tensor in self.memory()]
        names = sorted(self.spoilers)
        seen = set()
        for number in range(count):
            # every spoiler alone first, then several together
            few = (
                [names[number]] if number < len(names) else rng.sample(names, rng.choice((1, 2, 3)))
            )
            call = self.good()
            # one for each argument: a spoiler expects what is right; and one length, for two may agree
            chosen = {
                "length" if name.endswith("length") else name.split(":")[0]: name for name in few
            }
            few = list({name.split(":")[0]: name for name in chosen.values()}.values())
            for name in few:
                self.spoilers[name](rng, call)
            raised = None
            try:
                self.op(**call)
            except Exception as error:
                raised = error
            assert raised is not None, f"call {number} passed: {few}"
            seen.add(type(raised))
            for tensor, old in zip(self.memory(), before, strict=True):
                assert torch.equal(tensor, old), f"call {number} wrote: {few}"
        return seen


def put(name, make):
    """Return a spoiler that replaces an argument by ``make(rng, old)``."""

    def spoil(rng, call):
        call[name] = make(rng, call[name])

    return spoil


def not_a_tensor(rng, _old):
    return rng.choice([None, "x", 1.5, 7, [1.5, "a"], object()])


def other_dtype(rng, old):
    wrong = [torch.int32, torch.float64, torch.uint8, torch.bool, torch.bfloat16, torch.int64]
    return old.to(rng.choice([dtype for dtype in wrong if dtype is not old.dtype]))


def other_rank(rng, old):
    return rng.choice([old[None], old[:, None], old.sum().to(old.dtype)])


def other_place(_rng, old):
    return old.to("meta")


def sparse(_rng, old):
    return old.to_sparse()


def other_length(rng, old):
    return rng.choice([old[:-1], torch.cat([old, old[:1]]), old[:0]])


def strided(_rng, old):
    return torch.stack([old, old], dim=1)[:, 0]


def one_element(values):
    """Return a maker that replaces one element by one of *values*."""

    def make(rng, old):
        new = old.clone()
        new[rng.randrange(new.numel())] = rng.choice(values)
        return new

    return make


def of_any_tensor(name):
    """Return the spoilers that are wrong for every tensor argument."""
    return {
        f"{name}: not a tensor": put(name, not_a_tensor),
        f"{name}: dtype": put(name, other_dtype),
        f"{name}: rank": put(name, other_rank),
        f"{name}: device": put(name, other_place),
        f"{name}: sparse": put(name, sparse),
    }


def of_layout(dead_handle):
    return {
        "layout: unknown": put("layout", lambda rng, old: rng.choice([0, -1, HUGE, old + 1000])),
        "layout: gone": put("layout", lambda rng, old: dead_handle),
        "layout: no number": put("layout", lambda rng, old: rng.choice([None, "x", 1.5, []])),
    }


def of_caches(caches):
    wrong = [
        [*caches, caches[0]],
        [caches[0][:-1], *caches[1:]],
        [caches[0].view(torch.int8), *caches[1:]],
        [caches[0][None], *caches[1:]],
        [torch.stack([caches[0]] * 2, 1)[:, 0], *caches[1:]],
        [caches[0].to("meta"), *caches[1:]],
    ]

    def make(rng, _old):
        return rng.choice(wrong)

    return {"caches: others": put("caches", make)}


def of_budget():
    sms, flight = [0, -1, 1025, HUGE, "x", None], [0, -1, 1023, 1 << 40, 1.5]
    return {
        "max_sms: range": put("max_sms", lambda rng, old: rng.choice(sms)),
        "bytes_in_flight: range": put("bytes_in_flight", lambda rng, old: rng.choice(flight)),
    }
