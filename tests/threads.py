"""What threads of this process wait for, as the kernel tells it."""

from __future__ import annotations

import os
from pathlib import Path

TASKS = Path("/proc/self/task")


def readable(path: Path) -> bool:
    try:
        path.read_text()
    except OSError:
        return False
    return True


def settled(thread: Path) -> list[str]:
    """The system call that a thread is blocked in, and its arguments; one that never blocks has none."""
    for _ in range(1_000_000):
        if not (told := thread.read_text()).startswith("running"):
            break
        os.sched_yield()
    return told.split()
