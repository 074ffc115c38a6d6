"""Fixtures for every test: the device that is here, poisoned buffers, reasons for skips."""

import importlib.util
import threading

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("vllm") and not HAS_VLLM:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture
def device():
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def poisoned():
    """Return a buffer maker whose bytes are all 0xA5, so that a stray or a missing write shows."""

    def make(*shape, device="cpu"):
        return torch.full(shape, 0xA5, dtype=torch.uint8, device=device)

    return make


@pytest.fixture
def random_bytes():
    """Return a maker of uint8 tensors with every bit pattern (NaN, Inf, denormal); seed fixed."""

    def make(*shape, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    return make


@pytest.fixture(scope="session", autouse=True)
def no_thread_is_left_behind():
    """Check at the end of the run that every thread of ours, by its name, was joined."""
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")]
    assert not left, f"threads not joined: {left}"
