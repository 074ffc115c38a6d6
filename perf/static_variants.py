"""Which kernels the models of `models.py` need, with everything the compiler asks for.

To add kernels to the static report, write a function that returns `Variant`s and put it into `BUILDERS` below under a
name; `python -m perf.static_report --only NAME` then shows it alone, and `--update` writes it to the committed table.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvferry.kernels import block_copy
from kvferry.kernels.block_copy import (
    COMPARE_CHECKSUM,
    NO_CHECKSUM,
    TURNS,
    WRITE_CHECKSUM,
    choose_shape,
)
from kvferry.kernels.checksum import FOLD, KEY, SEED
from kvferry.kernels.gather import BYTES_IN_FLIGHT, MAX_SMS

from .models import MODELS

MAX_REGISTERS = 64
"""Of a copy kernel: with more, two programs of 512 threads do not fit beside a model's own."""

MAX_CHECKSUM = 7.0
"""How many more instructions for each 16 bytes a checksum may cost in any variant: three multiply-adds for the digest,
one for the key, one wide one and its addition, one for what the compiler moves about."""

MAX_CHECKSUM_SHARE = 0.35
"""What that may be of the instructions without one, as a mean over the variants of the usual tile: both directions, all
architectures. Smaller tiles need fewer instructions without it, and the same for it."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of one kernel.

    Attributes:
        name: unique; what the table calls it.
        kernel: a function under ``@triton.jit``.
        types: argument -> Triton's name of its type, for instance ``*i64`` or ``i32``, constants left out.
        constants: values of the ``tl.constexpr`` arguments; of another argument too, if it is None.
        num_warps: of one program.
        aligned: arguments that Triton is told are multiples of 16: pointers to tensors, as a launch would find them.
        data_bits: how wide each access to data must be; data are the accesses with a cache hint. 0: not asked.
        max_registers: at most so many; 0: not asked.
        plain: the variant that does the same without a checksum, whose price is then asked; "" if there is none.
        usual: whether that price counts towards the mean.
        quick: whether it is part of the short run of CI.
        amd: whether it must compile for gfx942 too.
        options: of the launch, besides the number of warps.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    aligned: tuple[str, ...] = ()
    data_bits: int = 128
    max_registers: int = MAX_REGISTERS
    plain: str = ""
    usual: bool = False
    quick: bool = False
    amd: bool = False
    architectures: tuple[int, ...] = field(default=(80, 90, 100))
    options: dict[str, Any] = field(default_factory=dict)


def blocks() -> Iterator[Variant]:
    """Gather and scatter of blocks, with and without checksums and flags."""
    kernel = block_copy._copy_blocks_kernel
    types = {name: "*i64" for name in kernel.arg_names if name.endswith("_ptr")}
    pointers = tuple(types)
    types |= dict.fromkeys(["place_keys_ptr", "mismatch_ptr", "done_ptr"], "*i32")
    types |= dict.fromkeys(
        ["num_units", "checksum_stride", "mismatch_stride", "done_stride"], "i32"
    )
    # every page of these models is a multiple of 16 bytes
    shapes = {choose_shape(16, model.largest_page, MAX_SMS, BYTES_IN_FLIGHT) for model in MODELS}
    for shape in sorted(shapes, key=lambda shape: -shape.lanes):
        for to_blob in (True, False):
            verb = "gather" if to_blob else "scatter"
            size = f"{shape.tile_bytes >> 10} KiB"
            sums = WRITE_CHECKSUM if to_blob else COMPARE_CHECKSUM
            usual = shape == choose_shape(16, 1 << 20, MAX_SMS, BYTES_IN_FLIGHT)
            extras = [("", NO_CHECKSUM, False), (", checksum", sums, False)]
            # a flag is raised outside of the loop that moves data: it is looked at once
            extras += (
                [(", flag", NO_CHECKSUM, True), (", checksum, flag", sums, True)] if usual else []
            )
            for extra, mode, done in extras:
                constants = {
                    "TO_BLOB": to_blob, "WORD_BYTES": shape.word_bytes, "TURNS": TURNS, "LANES": shape.lanes,
                    "CHECKSUM": mode, "HAS_DONE": done, "FOLD": FOLD, "KEY": KEY, "SEED": SEED,
                }  # fmt: skip
                yield Variant(
                    f"{verb} blocks, {size}{extra}", kernel, types, constants, shape.num_warps, pointers,
                    plain=f"{verb} blocks, {size}" if mode else "", usual=usual and not done,
                    quick=usual and not done, amd=usual and not extra,
                )  # fmt: skip


# a name, and a function that returns its variants
BUILDERS: dict[str, Callable[[], Iterable[Variant]]] = {
    "blocks": blocks,
}


def variants(only: str | None = None) -> list[Variant]:
    """Return all variants, or those of one builder."""
    # they return this module's Variants, so they cannot be imported before there are any
    from .static_rows import heads, quantized, slots

    builders = BUILDERS | {"slots": slots, "heads": heads, "quantized": quantized}
    found = [
        variant for name, build in builders.items() if only in (None, name) for variant in build()
    ]
    names = [variant.name for variant in found]
    assert len(set(names)) == len(names), "two variants have the same name"
    return found
