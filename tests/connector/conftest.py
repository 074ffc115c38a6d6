"""Real engines for the cases of this folder.

vLLM is imported once here, outside the rule that a warning is an error: it and its dependencies warn while they load.
"""

import importlib.util
import warnings

import pytest

from .engine_worker import Worker

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector  # noqa: F401


@pytest.fixture(scope="session")
def worker(tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("engine") / "engine.log")
    yield worker
    worker.stop()


@pytest.fixture
def run(worker):
    return lambda case, **arguments: worker.run(case, arguments)


@pytest.fixture
def run_alone(tmp_path):
    """Run a case in a process of its own: for engines that have processes below them."""
    worker = Worker(tmp_path / "engine.log")
    yield lambda case, **arguments: worker.run(case, arguments)
    worker.stop()
