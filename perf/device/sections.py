"""The sections of the device check, most valuable first."""

from perf.device.schedule import Section

SECTIONS = (
    Section(
        "correctness", "perf.device.correctness",
        85,
        "does every kernel move the same bytes as its twin, in device memory and in registered memory?",
    ),
    Section("link", "perf.device.link", 15, "what can the link do, by the copy engine?"),
    Section(
        "direct", "perf.device.direct",
        70,
        "S: what do Triton kernels reach straight to and from host memory, with how many SMs?",
    ),
    Section(
        "copy_engine", "perf.device.copy_engine",
        45,
        "B: what does the batch copy reach, by size and count, and what does it cost the host?",
    ),
    Section("staged", "perf.device.staged", 25, "G: does a gather in HBM and one DMA per blob fill the link?"),
    Section("bulk", "perf.device.bulk", 30, "T: does a bulk-copy ring fill the link with one or two SMs?"),
    Section(
        "interference", "perf.device.interference",
        55,
        "what does each path cost a matrix product and a memory-bound kernel beside it?",
    ),
    Section("registration", "perf.device.registration", 25, "what does pinning host memory cost?"),
    Section("price", "perf.device.price", 30, "what do checksums, fp8, the order of heads, and handing over a transfer cost?"),
    Section("sanitizer", "perf.device.sanitizer", 20, "does a memory checker find anything?"),
)  # fmt: skip
