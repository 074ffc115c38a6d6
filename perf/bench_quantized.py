"""What does fp8 cost on the way? gather_quantized and scatter_dequantized against memcpy and plain torch.

bfloat16 blocks to e4m3 codes with a scale per token and head, and back; all blocks of a cache far larger than
the processor's caches, shuffled, 32 to a call. The memcpy moves the bytes of the cache's side. torch's way is the
usual one: the largest of each row, a division, a cast; its scales are no powers of two, so its bytes differ and
only its error is checked.

    python -m perf.bench_quantized --assert
"""

import sys
from functools import partial

import torch
from perf.harness import Case, Figure, Gate, parser, run
from perf.token_cache import (
    BLOCK,
    MODELS,
    Model,
    TokenCache,
    device_of,
    memcpy,
    provider,
    there_and_back,
)

from kvferry.kernels import reference_quantized
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kvops import ops

WORKING_SET, BLOCKS = 128 << 20, 32
LARGEST = 448.0


def torch_fp8(cache: TokenCache, *, is_load: bool):
    """Return torch's way, and whether what it keeps is within its error."""
    model: Model = cache.model
    width = model.dim
    shape = cache.count, model.layers, -1, width
    codes = torch.empty(
        (cache.count, model.layers, model.row_bytes // model.layers // 2 // width * BLOCK, width),
        dtype=torch.float8_e4m3fn, device=cache.device,
    )  # fmt: skip
    scales = torch.empty((*codes.shape[:3], 1), device=cache.device)
    ids = cache.ids.to(cache.device)
    parts = [slice(n, n + BLOCKS) for n in range(0, cache.count, BLOCKS)]

    def store() -> None:
        for part in parts:
            for index, view in enumerate(cache.views):
                rows = view[ids[part]].reshape(-1, *codes.shape[2:])
                scale = rows.abs().amax(-1, keepdim=True).float() / LARGEST
                codes[part, index] = (rows.float() / scale).to(codes.dtype)
                scales[part, index] = scale

    def load() -> None:
        for part in parts:
            for index, view in enumerate(cache.views):
                rows = codes[part, index].float() * scales[part, index]
                view[ids[part]] = rows.to(view.dtype).view(-1, *view.shape[1:])

    def is_close() -> bool:
        back = (codes.float() * scales).view(shape)
        return all(
            torch.allclose(
                back[:, index].reshape(view.shape), view[ids].float(), rtol=0.07, atol=0.01
            )
            for index, view in enumerate(cache.views)
        )

    if is_load:
        store()
    return (load if is_load else store), is_close


def cases(tiny: bool) -> list[Case]:
    """Return both models, both ways."""
    device, made = device_of(), []
    for model in MODELS:
        cache = TokenCache(model, 0 if tiny else WORKING_SET, device)
        rows = QuantizedRows.from_rows(cache.rows)
        layout = ops.register_quantized(rows)
        buffer = cache.buffer(cache.count * rows.block_bytes)
        offsets = torch.arange(cache.count) * rows.block_bytes
        parts = [slice(n, n + BLOCKS) for n in range(0, cache.count, BLOCKS)]

        def move(op, layout=layout, buffer=buffer, offsets=offsets, parts=parts, ids=cache.ids):
            for part in parts:
                op(layout, ids[part], buffer, offsets[part])

        move(ops.gather_quantized)
        expected, first = buffer.clone(), cache.kept()
        twin = torch.full((2, rows.block_bytes), 0xA5, dtype=torch.uint8)
        reference_quantized.gather_quantized(rows, cache.ids[:2].tolist(), twin)
        if not torch.equal(twin, buffer.view(cache.count, -1)[:2]):
            raise SystemExit("the blobs are not what their twin says")
        # what comes back is quantised once: from here on nothing more is lost
        move(ops.scatter_dequantized)
        kept = cache.kept()
        for is_load, op in ((False, ops.gather_quantized), (True, ops.scatter_dequantized)):
            cache.put_back(first)
            work = {"kvferry": lambda op=op, move=move: move(op)}
            run_torch, is_close = torch_fp8(cache, is_load=is_load)
            providers = there_and_back(cache, buffer, expected, kept, work, is_load=is_load)
            if not is_load:
                # a load has left what it kept, which may round again
                providers[0].before = partial(cache.put_back, first)
            clear = partial(cache.fill, 0.0) if is_load else partial(cache.put_back, first)
            providers.append(provider("torch_fp8", device, run_torch, clear, is_close))
            moved = model.row_bytes * BLOCK
            roof = memcpy(torch.empty(cache.count * moved, dtype=torch.uint8), cache.count, device)
            direction = "load" if is_load else "store"
            title = f"{model.name} {direction}"
            made.append(Case(title, moved, cache.count, [roof, *providers], direction))
    return made


def gates(figures: list[Figure]) -> list[Gate]:
    """Return the limits: never slower than torch's way."""
    if torch.cuda.is_available():
        return []
    by_name = {(figure.case.name, figure.provider): figure for figure in figures}
    return [
        Gate(f"{name}: time / torch's", figure.p50 / by_name[name, "torch_fp8"].p50, 1.0)
        for (name, way), figure in by_name.items()
        if way == "kvferry"
    ]


def main() -> int:
    """Run the benchmark."""
    args = parser("bench_quantized", __doc__).parse_args()
    torch.set_num_threads(1)
    return run("bench_quantized", args, cases(args.quick or args.dry_run or args.list), gates)


if __name__ == "__main__":
    sys.exit(main())
