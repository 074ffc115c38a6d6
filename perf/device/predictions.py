"""What the device run is expected to show, written down before any run; `perf/results/predictions.md` is made of it.

python -m perf.device.predictions > perf/results/predictions.md
"""

import dataclasses
import re
import statistics
from collections.abc import Iterable, Mapping

LINK_GBPS = 55.0
"""GB/s of a copy engine over PCIe 5.0 x16, one direction."""
SM_LINK_GBPS = 52.0
"""GB/s that SMs reach over the same link at best."""
ROUND_TRIP_US = 1.3
"""Microseconds of a read of host memory by an SM."""
ISSUE_US = 0.2
"""Microseconds of a tile's instructions; its row is fetched while the bytes of the tile before are on their way."""
HBM_LATENCY_US = 0.8
"""Microseconds of a read of device memory under load."""
HBM_COPY_GBPS = 4300.0
"""GB/s read plus written of a copy inside device memory: seen on an H200, by torch's own copy."""
BULK_RING_BYTES = 160 << 10
"""Bytes that one CTA of the bulk-copy ring loads at a time: its shared memory holds 14 stages of 16 KiB, 4 of which may
be on their way out."""
NUM_SMS = 132
"""SMs of an H200."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One figure of one section.

    Attributes:
        section: whose.
        what: in words.
        case: a regular expression for the rows' cases.
        provider: a regular expression for their providers.
        low: what it is at least.
        high: what it is at most.
        because: what it was derived from.
        field: of the row.
        pick: "max", "min" or "median" over the rows.
        unit: of the figure.
    """

    section: str
    what: str
    case: str
    provider: str
    low: float
    high: float
    because: str
    field: str = "gbps"
    pick: str = "median"
    unit: str = "GB/s"

    def measured(self, rows: Iterable[Mapping[str, str]]) -> float | None:
        """Return the figure that *rows* have for it; None if they have none with right bytes."""
        found = [
            float(row[self.field])
            for row in rows
            if row["bench"] == f"device_check {self.section}"
            and re.fullmatch(self.case, row["case"])
            and re.fullmatch(self.provider, row["provider"])
            and row["match"] not in ("no", "error")
            and float(row["p50_us"])
        ]
        if not found:
            return None
        return {"max": max, "min": min, "median": statistics.median}[self.pick](found)

    @property
    def range(self) -> str:
        """The figure in words."""
        return f"{_short(self.low)} to {_short(self.high)} {self.unit}"


def _short(figure: float) -> str:
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"


def direct_gbps(direction: str, sms: int, tile_bytes: int) -> float:
    """Return what the model has for S: bytes in flight over the time until they are there, up to what the link gives.

    A read of host memory waits for the round trip. A write is posted: only the read of device memory before it waits.
    """
    wait_us = ISSUE_US + (ROUND_TRIP_US if direction == "h2d" else HBM_LATENCY_US)
    return min(SM_LINK_GBPS, sms * tile_bytes / wait_us / 1e3)


def _direct(direction: str, sms: int, tile_kib: int) -> Prediction:
    """Return the model's figure for one setting of S, with the model's error."""
    figure = direct_gbps(direction, sms, tile_kib << 10)
    wait = "round trip" if direction == "h2d" else "device memory"
    return Prediction(
        "direct", f"S {direction}, 64 KiB segments, SM cap {sms}, {tile_kib} KiB in flight each",
        f"{direction} 64 KiB", f"S {sms}x{tile_kib}K", figure * 0.65, min(figure * 1.35, 57),
        f"min({SM_LINK_GBPS:g}, {sms} x {tile_kib} KiB / (instructions {ISSUE_US} us + {wait} "
        f"{ROUND_TRIP_US if direction == 'h2d' else HBM_LATENCY_US} us)) = {figure:.1f}, +-35 %",
    )  # fmt: skip


GATHER_SHARE = 100 * 2 * LINK_GBPS / 4000
FREE_SMS = 100 * (1 - 8 / NUM_SMS)
BULK_GBPS = BULK_RING_BYTES / 1.5 / 1e3

PREDICTIONS = (
    Prediction("link", "copy engine, host to device", "h2d 256 MiB", "copy_engine", 52, 57,
               "PCIe 5.0 x16: 63 GB/s less headers; public runs of nvbandwidth have 52 to 57"),
    Prediction("link", "copy engine, device to host", "d2h 256 MiB", "copy_engine", 52, 57, "as above"),
    Prediction("link", "copy engines, both directions, sum", "both 256 MiB", "copy_engine", 83, 108,
               "vLLM's own figure is 83 GB/s; two full directions are 105"),
    Prediction("link", "copy inside device memory, read plus written", "device 256 MiB", "torch copy", 3900, 4500,
               f"{HBM_COPY_GBPS:.0f} GB/s was seen on an H200, for 8.6 GB"),
    *(_direct(direction, sms, kib) for direction in ("h2d", "d2h") for sms, kib in ((1, 16), (4, 16), (8, 16), (8, 32))),
    Prediction("direct", "S h2d at its best", r"h2d .*", r"S .*", 35, 55, pick="max",
               because="non-posted reads: nvbandwidth's SM read has 35 GB/s on H100, vLLM's kernel about 50"),
    Prediction("direct", "S d2h at its best", r"d2h .*", r"S .*", 48, 57, pick="max",
               because="posted writes: nvbandwidth's SM write has 52.8 GB/s on H100"),
    Prediction("copy_engine", "batch copy h2d, 4 to 24 KiB", r"h2d (4|8|16|24) KiB x 1024", "batch", 4, 9,
               "public curve of an H100 (vLLM pull request 42212): 4 to 7 GB/s below 28 KiB"),
    Prediction("copy_engine", "batch copy h2d, 64 KiB and more", r"h2d (64|256|2048) KiB x (64|256|1024)", "batch",
               40, 57, "the same curve: 40 to 44 at 28 KiB, 51 at 64 KiB"),
    Prediction("copy_engine", "batch copy d2h, 32 KiB and more", r"d2h (32|64|256|2048) KiB x (64|256|1024)", "batch",
               40, 57, "the same source: device to host has no cliff"),
    Prediction("copy_engine", "host time of a descriptor in a batch", r".* x 1024", "batch submit", 0.05, 0.6,
               "one call for all, numpy arrays by address (0.9 us a call on a CPU), then the driver's own work",
               field="p50_us", unit="us"),
    Prediction("copy_engine", "host time of a copy in a loop", r".* x 256", "loop submit", 1.0, 4.0,
               "2.3 us for each cudaMemcpyAsync on an H20 (FlexKV pull request 193)", field="p50_us", unit="us"),
    Prediction("staged", "G d2h, of the copy engine's roof", r"d2h .*", f"G {NUM_SMS}", 93, 101,
               "blobs are 243 KiB and more, above every cliff; all gathers but the first hide behind the copies",
               field="roof_pct", unit="%"),
    Prediction("staged", "G h2d, of the copy engine's roof", r"h2d .*", f"G {NUM_SMS}", 93, 101,
               "as above, all scatters but the last", field="roof_pct", unit="%"),
    Prediction("staged", "gather inside device memory, read plus written", r"d2h .*", f"gather alone {NUM_SMS}",
               2500, 4300, f"at most torch's copy, {HBM_COPY_GBPS:.0f} GB/s; at 4000 GB/s it takes 2 x {LINK_GBPS:g} / "
               f"4000 = {GATHER_SHARE:.1f} % of the time of the copy over the link"),
    Prediction("bulk", "T h2d with one SM", "h2d 64 KiB", "T 1", 45, 57,
               f"min(link, {BULK_RING_BYTES >> 10} KiB / 1.5 us = {BULK_GBPS:.0f} GB/s)"),
    Prediction("bulk", "T d2h with one SM", "d2h 64 KiB", "T 1", 45, 57, "as above; writes are posted"),
    Prediction("interference", "matrix product beside the batch copy, 2 MiB", r"gemm beside .*", "B 2048 KiB", 97, 101,
               "no SM is used, and the link's bytes are 1.3 % of device memory's", field="roof_pct", unit="%"),
    Prediction("interference", "matrix product beside G", r"gemm beside .*", f"G {NUM_SMS}", 95, 101,
               f"the gather runs {GATHER_SHARE:.1f} % of the time", field="roof_pct", unit="%"),
    Prediction("interference", "matrix product beside S with 8 SMs", r"gemm beside .*", "S 8", 88, 97,
               f"8 of {NUM_SMS} SMs are shared: 1 - 8/{NUM_SMS} = {FREE_SMS:.0f} %, and one wave may wait for them",
               field="roof_pct", unit="%"),
    Prediction("interference", "matrix product beside S without a cap", r"gemm beside .*", f"S {NUM_SMS}", 20, 75,
               "an uncapped grid slowed a co-running kernel 1.6 times on B200 (tokenspeed pull request 150)",
               field="roof_pct", unit="%"),
    Prediction("interference", "matrix product beside T with 1 SM", r"gemm beside .*", "T 1", 96, 101,
               f"1 of {NUM_SMS} SMs, one warp of it", field="roof_pct", unit="%"),
    Prediction("interference", "memory-bound kernel beside the batch copy", r"decode beside .*", "B 2048 KiB", 96, 101,
               f"{LINK_GBPS:g} of {HBM_COPY_GBPS:.0f} GB/s", field="roof_pct", unit="%"),
    Prediction("interference", "memory-bound kernel beside S with 8 SMs", r"decode beside .*", "S 8", 90, 101,
               "as above, and 6 % of the SMs, of which a memory-bound kernel has enough", field="roof_pct", unit="%"),
    Prediction("registration", "register a GiB whose pages are there", "register populated", r"pinning .*", 5, 20,
               "0.1 s for each GB with 4 KiB pages (vLLM pull request 51081)"),
    Prediction("registration", "register a GiB whose pages are not", "register cold", r"pinning .*", 0.8, 4,
               "3 to 6 times as long: the pages are made on the way"),
    Prediction("price", "S d2h with a checksum, speed of the plain one", r"checksum d2h", "with checksum", 96, 103,
               "bound by the link, not by instructions", field="roof_pct", unit="%"),
    Prediction("price", "S h2d with verification, speed of the plain one", r"checksum h2d", "with checksum", 93, 103,
               "as above", field="roof_pct", unit="%"),
    Prediction("price", "gather in device memory with a checksum, speed of the plain one", "checksum device",
               "with checksum", 70, 101, "a third more instructions for each 16 bytes, in a kernel bound by memory",
               field="roof_pct", unit="%"),
    Prediction("price", "fp8 gather d2h, speed of the plain one", r"fp8 d2h", "quantized", 150, 200,
               field="roof_pct", unit="%",
               because="half of the bytes, and 4 of scale for each 256 numbers of K and V or fewer, cross the link: "
               "1 / (0.5 x (1 + 4/128)) = 194 % if 16 SMs quantise 2 x 52 GB/s of numbers"),
    Prediction("price", "gather d2h in the order of heads, speed of the plain one", r"heads d2h", "by heads", 85, 103,
               "the same bytes in runs of 256 and more, still bound by the link", field="roof_pct", unit="%"),
    Prediction("price", "host time to submit 2,000 blocks of 80 layers by S", "submit .*", "S", 60, 1000,
               "16 bytes of metadata for each block packed by numpy, one copy of 32 KB, one Triton launch of 20 to 50 us",
               field="p50_us", unit="us"),
    Prediction("price", "host time to submit the same by B", "submit .*", "B", 8000, 100_000,
               "160,000 descriptors of 50 to 600 ns each", field="p50_us", unit="us"),
)  # fmt: skip


def markdown() -> str:
    """Return the predictions as a document."""
    lines = [
        "# Predictions for the device run",
        "",
        "**Nothing here was measured by kvferry.** Each figure is what a formula, or somebody else's published run, says",
        "an H200 over PCIe 5.0 x16 will do; `python -m perf.device_check --out DIR` puts its own beside them. Made by",
        "`python -m perf.device.predictions` from the table in that script.",
        "",
        f"Constants of the model: link {LINK_GBPS:g} GB/s, by SMs {SM_LINK_GBPS:g} GB/s; round trip to host memory",
        f"{ROUND_TRIP_US} us; instructions of a tile {ISSUE_US} us; read of device memory {HBM_LATENCY_US} us; copy in device",
        f"memory {HBM_COPY_GBPS:.0f} GB/s read plus written. Bytes in flight of one program of S are its tile, all of whose loads",
        "are issued before the first is used: `perf/results/static.csv` has the compiler's word for it.",
        "",
    ]
    section = None
    for prediction in PREDICTIONS:
        if prediction.section != section:
            section = prediction.section
            lines += [f"## {section}", "", "| what | predicted | from |", "|---|---|---|"]
        lines.append(f"| {prediction.what} | {prediction.range} | {prediction.because} |")
        if (
            prediction is PREDICTIONS[-1]
            or PREDICTIONS[PREDICTIONS.index(prediction) + 1].section != section
        ):
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
