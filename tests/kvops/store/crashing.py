"""What the storm scripts share: a forked child that is killed somewhere in its work, a temporary file on tmpfs."""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path


def arguments(doc, runs):
    """Parse --runs, --seed and --keep-going; return them and a seeded source of random numbers."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--runs", type=int, default=runs, help="rounds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    options = parser.parse_args()
    options.seed = options.seed or random.SystemRandom().randrange(1, 1 << 32)
    print(f"seed {options.seed}", flush=True)
    return options, random.Random(options.seed)


@contextlib.contextmanager
def arena_file():
    """A path on tmpfs that is gone afterwards."""
    where = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=where if where.is_dir() else None) as folder:
        yield Path(folder) / "storm.arena"


def fork(work):
    """Run *work* in a child of this process; return its pid. The child ends with it, whatever it does."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def end(pid, after_s=None):
    """Wait for a child, killing it after *after_s* seconds; return whether it was killed."""
    if after_s is not None:
        # the moment of death is what these scripts are about
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            raise RuntimeError(f"the child died of signal {os.WTERMSIG(status)}")
        return True
    if os.WEXITSTATUS(status):
        raise RuntimeError("the child failed")
    return False


def die_at_line(number, folder):
    """Kill this process when *number* lines of the files in *folder* have run, in this and in later threads."""
    left = number

    def count(frame, event, arg):
        nonlocal left
        if event == "line":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return count

    def enter(frame, event, arg):
        return count if frame.f_code.co_filename.startswith(folder) else None

    threading.settrace(enter)
    sys.settrace(enter)
