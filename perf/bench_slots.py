"""How fast do tokens move, one row each? gather_slots and scatter_slots against memcpy and index_select.

All tokens of a cache far larger than the processor's caches, shuffled, 512 to a call. A row of Llama is
K and V of every head: 512 pieces of 256 bytes; a row of DeepSeek 61 pieces of 1,152 bytes.

    python -m perf.bench_slots --assert
"""

import sys

import torch
from perf.harness import Case, Figure, Gate, parser, run
from perf.token_cache import BLOCK, MODELS, TokenCache, device_of, memcpy, there_and_back

from kvferry.kernels import reference_heads
from kvferry.kvops import ops

WORKING_SET, TOKENS = 192 << 20, 512


def ways(cache: TokenCache, slots: torch.Tensor, rows: torch.Tensor, *, is_load: bool) -> dict:
    """Return name -> work."""
    layout = ops.register_rows(cache.rows)
    op = ops.scatter_slots if is_load else ops.gather_slots
    parts = [slice(n, n + TOKENS) for n in range(0, slots.numel(), TOKENS)]
    heads, dim = cache.model.heads, cache.model.dim
    blocks, tokens = slots // BLOCK, slots % BLOCK
    shape = (cache.model.layers, 2, heads, dim) if heads else (cache.model.layers, dim)
    numbers = rows.view(torch.bfloat16).view(-1, *shape)

    def kvferry() -> None:
        for part in parts:
            op(layout, slots[part], rows[part])

    def index_copy() -> None:
        for part in parts:
            for index, view in enumerate(cache.views):
                place = numbers[part, index]
                if heads:
                    # [T, H, 2 D] in the cache, [T, 2, H, D] in a row
                    where = (blocks[part], slice(None), tokens[part])
                    if is_load:
                        view[where] = place.transpose(1, 2).reshape(-1, heads, 2 * dim)
                    else:
                        place.copy_(view[where].view(-1, heads, 2, dim).transpose(1, 2))
                elif is_load:
                    view[blocks[part], tokens[part]] = place
                else:
                    place.copy_(view[blocks[part], tokens[part]])

    return {"kvferry": kvferry, "index_copy": index_copy}


def cases(tiny: bool) -> list[Case]:
    """Return both models, both ways."""
    device, made = device_of(), []
    for model in MODELS:
        cache = TokenCache(model, 0 if tiny else WORKING_SET, device)
        order = torch.Generator().manual_seed(2)
        slots = torch.randperm(cache.rows.num_slots, generator=order).to(device)
        buffer = cache.buffer(slots.numel() * model.row_bytes)
        rows = buffer.view(-1, model.row_bytes)
        few = min(64, slots.numel())
        for is_load in (False, True):
            kept, expected = cache.kept(), torch.empty_like(buffer)
            there = ways(cache, slots, rows, is_load=False)
            there["kvferry"]()
            expected.copy_(buffer)
            twin = torch.empty(few, model.row_bytes, dtype=torch.uint8)
            reference_heads.gather_slots(cache.rows, slots[:few], twin)
            if not torch.equal(twin, rows[:few]):
                raise SystemExit("the rows are not what their twin says")
            work = ways(cache, slots, rows, is_load=is_load)
            providers = there_and_back(cache, buffer, expected, kept, work, is_load=is_load)
            roof = memcpy(buffer, slots.numel(), device)
            direction = "load" if is_load else "store"
            title = f"{model.name} {direction}"
            made.append(Case(title, model.row_bytes, slots.numel(), [roof, *providers], direction))
    return made


def gates(figures: list[Figure]) -> list[Gate]:
    """Return the limits: never slower than torch's own indexing."""
    if torch.cuda.is_available():
        return []
    by_name = {(figure.case.name, figure.provider): figure for figure in figures}
    return [
        Gate(f"{name}: time / index and copy", figure.p50 / by_name[name, "index_copy"].p50, 1.0)
        for (name, provider), figure in by_name.items()
        if provider == "kvferry"
    ]


def main() -> int:
    """Run the benchmark."""
    args = parser("bench_slots", __doc__).parse_args()
    torch.set_num_threads(1)
    return run("bench_slots", args, cases(args.quick or args.dry_run or args.list), gates)


if __name__ == "__main__":
    sys.exit(main())
