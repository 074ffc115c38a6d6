"""Run sections, each in processes of its own, inside one budget of seconds."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from perf.device import child
from perf.device.record import NOTE

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 6.0
"""How long a case may go on after its section's time is over; then its process is killed."""
START_S = 10.0
"""What a process needs to get to its first case (imports, a CUDA context); with less time left none is started."""
MOST_STARTS = 4
"""Processes of one section, when each ends at a case that takes it along."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the check.

    Attributes:
        name: what it is called.
        module: where its cases are.
        seconds: its share of the default budget.
        question: what it answers.
    """

    name: str
    module: str
    seconds: float
    question: str


@dataclasses.dataclass
class Outcome:
    """How a section ended.

    Attributes:
        section: which.
        ended: "all cases", "cut", or what happened.
        seconds: what it took.
        starts: processes it took.
        notes: what it said for the summary.
    """

    section: Section
    ended: str = "not started: no time left"
    seconds: float = 0.0
    starts: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)


class Runner:
    """Starts the processes and keeps what they say."""

    def __init__(
        self,
        csv_path: Path,
        log_path: Path,
        scratch: Path,
        budget_s: float,
        *,
        machine: str = "CudaMachine",
        commit: str = "",
        program: str = "perf.device.child",
        start_s: float = START_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._csv, self._log_path, self._scratch = csv_path, log_path, scratch
        self._machine, self._commit, self._program = machine, commit, program
        self._start_s, self._grace_s = start_s, grace_s
        self._began = time.monotonic()
        self._budget_s = budget_s

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget_s - (time.monotonic() - self._began)

    def run(self, sections: Sequence[Section]) -> list[Outcome]:
        """Run *sections* in order, then, with the time that is left, those that were cut once more.

        The last one may take all that is left.
        """
        outcomes = [Outcome(section) for section in sections]
        share = self._budget_s / max(sum(section.seconds for section in sections), self._budget_s)
        with self._log_path.open("a") as log:
            for outcome in outcomes:
                is_last = outcome is outcomes[-1]
                seconds = self.left_s if is_last else outcome.section.seconds * share
                self._run_section(outcome, seconds, log)
            for outcome in outcomes:
                if outcome.ended == "cut":
                    self._run_section(outcome, self.left_s, log)
        return outcomes

    def _run_section(self, outcome: Outcome, seconds: float, log: TextIO) -> None:
        """Run *outcome*'s section until it is done, its time is over, or too many of its processes have ended badly."""
        began = time.monotonic()
        # the last process may take its grace: it is part of the budget
        end = began + min(seconds, self.left_s - self._grace_s)
        for _ in range(MOST_STARTS):
            if end - time.monotonic() < self._start_s:
                break
            outcome.starts += 1
            before = self._attempts(outcome)
            status = self._run_process(outcome, end, log)
            outcome.ended = {child.DONE: "all cases", child.CUT: "cut"}.get(
                status, f"process ended: {status}"
            )
            # a process that got to no case would get to none again
            if status in (child.DONE, child.CUT) or self._attempts(outcome) == before:
                break
        outcome.seconds += time.monotonic() - began

    def _attempted(self, section: Section) -> Path:
        return self._scratch / f"{section.name}.attempted"

    def _attempts(self, outcome: Outcome) -> str:
        """Return the cases of a section that were attempted so far."""
        path = self._attempted(outcome.section)
        return path.read_text() if path.exists() else ""

    def _run_process(self, outcome: Outcome, end: float, log: TextIO) -> int | str:
        section = outcome.section
        command = [
            sys.executable, "-m", self._program, section.name, section.module, "--machine", self._machine,
            "--csv", str(self._csv), "--until", str(end), "--commit", self._commit,
            "--attempted", str(self._attempted(section)),
        ]  # fmt: skip
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        _say(f"== {section.name} (start {outcome.starts}, {self.left_s:.0f} s left)", log)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=environment, start_new_session=True,
        )  # fmt: skip
        reader = threading.Thread(target=_relay, args=(process, outcome.notes, log), daemon=True)
        reader.start()
        try:
            status: int | str = process.wait(max(end - time.monotonic(), 0) + self._grace_s)
        except subprocess.TimeoutExpired:
            # a process group of its own: what it started goes with it
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"killed {self._grace_s:g} s after its time"
        reader.join(10)
        if status == child.LOST:
            return "the device was lost"
        return f"signal {-status}" if isinstance(status, int) and status < 0 else status


def _relay(process: "subprocess.Popen[str]", notes: list[str], log: TextIO) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        for text in stream:
            _say(text.rstrip("\n"), log)
            if text.startswith(NOTE):
                notes.append(text.removeprefix(NOTE).strip())


def _say(text: str, log: TextIO) -> None:
    print(text, flush=True)
    log.write(text + "\n")
    log.flush()
