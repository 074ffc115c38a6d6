"""The device of a launch: Triton launches on the current device of the thread, whatever its arguments are on."""

import contextlib

import torch


def made_current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make *device*, and so its current stream, the one that launches go to; a host has neither."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
