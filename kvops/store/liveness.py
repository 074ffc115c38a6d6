"""Whether a process that left its name in an arena still lives: pid and start time, so that a reused pid is no life."""

import hashlib
import os
from pathlib import Path


def session_digest(session: str) -> int:
    """Return the 64-bit number that stands for *session* (an engine id) in an arena."""
    return int.from_bytes(hashlib.blake2b(session.encode(), digest_size=8).digest(), "little") or 1


def start_time(pid: int) -> int:
    """Return the start time of *pid* in clock ticks since boot; 0 if there is no such process, or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # the command name may hold spaces and brackets: fields are counted from the last one
    fields = text[text.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(pid: int, start: int) -> bool:
    """Return whether the process that was *pid* and began at *start* still runs."""
    return pid != 0 and start != 0 and start_time(pid) == start


def own_start_time() -> int:
    """Return this process's start time, in clock ticks since boot."""
    return start_time(os.getpid())
