"""A daemon of every kind, a client of it."""

import tempfile
from pathlib import Path

import pytest

from kvferry.kvops.vineyard.client import Client

from .daemons import KINDS, Daemon


def skip_unless_here(kind):
    find, _ = KINDS[kind]
    if find() is None:
        pytest.skip(
            f"{kind} is not here: install vineyard-bdist==0.24.2 (x86-64 Linux) or set KVFERRY_VINEYARDD"
        )


@pytest.fixture
def short_path():
    # a socket's path has at most 107 bytes; pytest's own folders can be longer
    with tempfile.TemporaryDirectory(prefix="kvf") as folder:
        yield Path(folder)


@pytest.fixture(scope="session", params=KINDS)
def shared_daemon(request):
    skip_unless_here(request.param)
    with tempfile.TemporaryDirectory(prefix="kvf") as folder:
        daemon = Daemon(request.param, Path(folder))
        yield daemon
        assert daemon.stop() == 0


@pytest.fixture
def daemon(shared_daemon):
    """A daemon that holds nothing; what vineyardd counts as used may stay above zero after a shrink."""
    with Client(shared_daemon.socket) as client:
        client.clear()
        for name in client.names.find():
            client.names.drop([name])
    return shared_daemon


@pytest.fixture(params=KINDS)
def own_daemon(request, short_path):
    """A daemon that the test may kill, stop and start."""
    skip_unless_here(request.param)
    daemon = Daemon(request.param, short_path)
    yield daemon
    daemon.stop()


@pytest.fixture
def client(daemon):
    with Client(daemon.socket) as client:
        yield client


@pytest.fixture
def other(daemon):
    """A second client of the same daemon."""
    with Client(daemon.socket) as client:
        yield client
