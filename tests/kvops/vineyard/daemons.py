"""Daemons to test against: how each is found, started and stopped. More kinds: add a line to KINDS."""

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from kvferry.kvops.errors import VineyardConnectionError
from kvferry.kvops.vineyard.client import Client

MEMORY_BYTES = 64 << 20
START_S = 60


def find_vineyardd():
    """Return the path of vineyardd 0.24.2, None if it is not here; its Python package is not imported."""
    named = os.environ.get("KVFERRY_VINEYARDD")
    if named:
        return Path(named)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        package = importlib.metadata.distribution("vineyard-bdist")
        path = Path(str(package.locate_file("vineyard/bdist/vineyardd")))
        return path if path.exists() else None
    return None


def vineyardd_command(socket, memory_bytes):
    return [
        str(find_vineyardd()),
        f"--socket={socket}",
        "--meta=local",
        "--rpc=false",
        f"--size={memory_bytes}",
    ]


KINDS = {"vineyardd": (find_vineyardd, vineyardd_command)}


class Daemon:
    """One running daemon.

    Attributes:
        kind: key of KINDS.
        socket: its path.
        pid: of its process.
    """

    def __init__(self, kind, folder, memory_bytes=MEMORY_BYTES):
        self.kind = kind
        self.socket = folder / "v.sock"
        self._folder = folder
        self._memory_bytes = memory_bytes
        self.start()

    def start(self):
        _, command = KINDS[self.kind]
        environment = {**os.environ, "GLOG_logtostderr": "1", "TMPDIR": str(self._folder)}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command(self.socket, self._memory_bytes),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=self._folder,
            )  # fmt: skip
        self.pid = self._process.pid
        deadline = time.monotonic() + START_S
        while True:
            client = Client(self.socket)
            try:
                client.status()
            except VineyardConnectionError:
                log_text = (self._folder / "log").read_text(errors="replace")
                assert self._process.poll() is None, log_text
                assert time.monotonic() < deadline, log_text
                threading.Event().wait(0.01)
            else:
                return
            finally:
                client.close()

    def kill(self):
        self._process.kill()
        self._process.wait()

    def stop(self):
        """Stop it the polite way; return its exit status."""
        if self._process.poll() is None:
            # a stopped one would not take the request
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        return self._process.wait(START_S)

    def pause(self):
        self._process.send_signal(signal.SIGSTOP)
        # the signal takes a moment; the kernel tells its parent when it has stopped
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def resume(self):
        self._process.send_signal(signal.SIGCONT)
