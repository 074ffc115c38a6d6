"""How fast do blocks come out of the paged cache? gather_blocks against a memcpy of as many bytes.

Random blocks of a cache far larger than the processor's, all layers of each into one blob; layers in one
storage (as an engine that lays its layers side by side has them) and each in a storage of its own. One
thread. On a CUDA device the blobs are pinned and the figures are the device's.

    python -m perf.bench_gather --assert
"""

import sys

import torch
from perf.harness import Case, Figure, Gate, parser, run
from perf.paged_cache import MODELS, Moves

WORKING_SET = 256 << 20
"""Bytes of a cache: eight times the last level of this machine's caches."""

LIMITS = {
    ("llama-3.1-8b", "one"): 0.85, ("llama-3.1-8b", "apart"): 0.80,
    ("deepseek-v3", "one"): 0.70, ("deepseek-v3", "apart"): 0.50,
}  # fmt: skip
"""Share of the memcpy's speed."""


def cases(*, is_load: bool, tiny: bool) -> list[Case]:
    """Return every model, with its layers in one storage and apart."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = []
    for model in MODELS:
        for name in ("one", "apart"):
            moves = Moves(model, 0 if tiny else WORKING_SET, device, one_storage=name == "one")
            providers = moves.providers(is_load=is_load)
            direction = "load" if is_load else "store"
            title = f"{model.name} {name}"
            made.append(Case(title, model.block_bytes, moves.count, providers, direction))
    return made


def gates(figures: list[Figure]) -> list[Gate]:
    """Return the stated limits; they are of the host's path."""
    if torch.cuda.is_available():
        return []
    by_name = {(figure.case.name, figure.provider): figure for figure in figures}
    made = []
    for (model, storage), limit in LIMITS.items():
        case = f"{model} {storage}"
        ours, other = by_name[case, "kvferry"], by_name[case, "index_copy"]
        made.append(Gate(f"{case}: of memcpy's speed", 1 / ours.ratio, limit, at_least=True))
        made.append(Gate(f"{case}: time / index_select and copy", ours.p50 / other.p50, 1.0))
    return made


def main(bench: str = "bench_gather", doc: str | None = __doc__, *, is_load: bool = False) -> int:
    """Run the benchmark."""
    args = parser(bench, doc or "").parse_args()
    torch.set_num_threads(1)
    tiny = args.quick or args.dry_run or args.list
    return run(bench, args, cases(is_load=is_load, tiny=tiny), gates)


if __name__ == "__main__":
    sys.exit(main())
