"""Real engines in a process that answers cases: engine_cases.py at the other end of a pipe."""

import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("engine_cases.py")
TIMEOUT_S = 600


class Worker:
    """A process that runs cases one after the other; a new one takes over where a case ended it."""

    def __init__(self, log):
        self.log = log
        self.process = None

    def run(self, case, arguments):
        if self.process is None or self.process.poll() is not None:
            self.start()
        self.process.stdin.write(json.dumps([case, arguments]).encode() + b"\n")
        self.process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            line = self.answers.readline() if selector.select(TIMEOUT_S) else b""
        if not line:
            self.stop()
        answer = json.loads(line or b'{"error": "no answer"}')
        assert "error" not in answer, (
            f"{answer['error']}\n{self.log.read_text(errors='replace')[-4000:]}"
        )
        return answer["result"]

    def start(self):
        self.stop()
        read_end, write_end = os.pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(CASES), "serve", str(write_end)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(write_end,), env=environment,
                start_new_session=True,
            )  # fmt: skip
        os.close(write_end)
        self.answers = os.fdopen(read_end, "rb", buffering=0)

    def stop(self):
        if self.process is not None:
            self.process.stdin.close()
            self.answers.close()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self.process = None
