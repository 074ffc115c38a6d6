"""How fast do heads come into canonical order? gather_heads and scatter_heads against memcpy and torch's permute.

A rank of four with two of Llama's eight KV heads: its pages [token][head][K, V] go to and from its places in
blobs [segment][head of the model][token][dim]. DeepSeek's latent has no heads: its canonical page is its page.
All blocks of a cache far larger than the processor's caches, shuffled, 32 to a call.

    python -m perf.bench_heads --assert
"""

import sys

import torch
from perf.harness import Case, Figure, Gate, parser, run
from perf.token_cache import BLOCK, Model, TokenCache, device_of, memcpy, there_and_back

from kvferry.kernels import reference_heads
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kvops import ops

WORKING_SET, BLOCKS = 128 << 20, 32

TOTAL, FIRST = 8, 2
"""KV heads of the model, and the first one of the rank."""

MODELS = (Model("llama-3.1-8b rank", 32, 2, 128), Model("deepseek-v3", 61, 0, 576))


def ways(cache: TokenCache, runs: HeadRuns, buffer: torch.Tensor, *, is_load: bool) -> dict:
    """Return name -> work."""
    layout = ops.register_heads(runs)
    op = ops.scatter_heads if is_load else ops.gather_heads
    offsets = torch.arange(cache.count) * runs.block_bytes
    parts = [slice(n, n + BLOCKS) for n in range(0, cache.count, BLOCKS)]
    heads, dim, layers = cache.model.heads, cache.model.dim, cache.model.layers
    shape = (layers, 2, TOTAL, BLOCK, dim) if heads else (layers, BLOCK, dim)
    numbers = buffer.view(torch.bfloat16).view(cache.count, *shape)
    ids = cache.ids.to(cache.device)

    def kvferry() -> None:
        for part in parts:
            op(layout, cache.ids[part], buffer, offsets[part])

    def permute_copy() -> None:
        for part in parts:
            for index, view in enumerate(cache.views):
                place = numbers[part, index]
                if not heads:
                    if is_load:
                        view[ids[part]] = place
                    else:
                        place.copy_(view[ids[part]])
                    continue
                mine = place[:, :, FIRST : FIRST + heads]
                if is_load:
                    view[ids[part]] = mine.permute(0, 2, 3, 1, 4).flatten(3)
                else:
                    pages = view[ids[part]].view(-1, heads, BLOCK, 2, dim)
                    mine.copy_(pages.permute(0, 3, 1, 2, 4))

    return {"kvferry": kvferry, "permute_copy": permute_copy}


def cases(tiny: bool) -> list[Case]:
    """Return both models, both ways."""
    device, made = device_of(), []
    for model in MODELS:
        cache = TokenCache(model, 0 if tiny else WORKING_SET, device)
        share = {"total_heads": TOTAL, "head_first": FIRST} if model.heads else {}
        runs = HeadRuns.from_rows(cache.rows, **share)
        buffer = cache.buffer(cache.count * runs.block_bytes)
        for is_load in (False, True):
            buffer.fill_(0xA5)
            ways(cache, runs, buffer, is_load=False)["kvferry"]()
            kept, expected = cache.kept(), buffer.clone()
            twin = torch.full((2, runs.block_bytes), 0xA5, dtype=torch.uint8)
            reference_heads.gather_heads(runs, cache.ids[:2].tolist(), twin)
            if not torch.equal(twin, buffer.view(cache.count, -1)[:2]):
                raise SystemExit("the blobs are not what their twin says")
            work = ways(cache, runs, buffer, is_load=is_load)
            providers = there_and_back(cache, buffer, expected, kept, work, is_load=is_load)
            moved = model.row_bytes * BLOCK
            roof = memcpy(torch.empty(cache.count * moved, dtype=torch.uint8), cache.count, device)
            direction = "load" if is_load else "store"
            title = f"{model.name} {direction}"
            made.append(Case(title, moved, cache.count, [roof, *providers], direction))
    return made


def gates(figures: list[Figure]) -> list[Gate]:
    """Return the limits: never slower than torch's permute and copy."""
    if torch.cuda.is_available():
        return []
    by_name = {(figure.case.name, figure.provider): figure for figure in figures}
    return [
        Gate(
            f"{name}: time / permute and copy", figure.p50 / by_name[name, "permute_copy"].p50, 1.0
        )
        for (name, provider), figure in by_name.items()
        if provider == "kvferry"
    ]


def main() -> int:
    """Run the benchmark."""
    args = parser("bench_heads", __doc__).parse_args()
    torch.set_num_threads(1)
    return run("bench_heads", args, cases(args.quick or args.dry_run or args.list), gates)


if __name__ == "__main__":
    sys.exit(main())
