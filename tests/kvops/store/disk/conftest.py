"""A folder, an engine with faults, and blob files on it; all closed, and no descriptor left, whatever a test does."""

import os

import pytest

from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.io_faults import FaultyIo
from kvferry.kvops.store.io_threads import ThreadIo

from .blobs import QUOTA


def open_descriptors():
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def io():
    io = FaultyIo(ThreadIo(depth=4, threads=1), seed=5)
    before = open_descriptors()
    yield io
    left = {io.open_files.get(int(fd)) for fd in open_descriptors() - before} - {None}
    assert not left, f"files left open: {left}"
    assert io.close(10.0)


@pytest.fixture
def open_files(folder, io):
    """Open blob files; they are closed at the end."""
    opened = []

    def make(quota_bytes=QUOTA, **kwargs):
        kwargs = {"sync": "never", **kwargs}
        files = BlobFiles.open(kwargs.pop("folder", folder), kwargs.pop("io", io), quota_bytes=quota_bytes, **kwargs)  # fmt: skip
        opened.append(files)
        return files

    yield make
    for files in opened:
        files.close()
