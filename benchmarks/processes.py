"""What a server and the processes that it started use."""

import contextlib
import os
from pathlib import Path


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    found = [pid]
    for parent in found:  # grows while it is walked
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found


def processor_s(pid: int) -> float:
    """Processor time of the tree so far, seconds. Processes that have ended are not in it."""
    ticks = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _stat(one)[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def proportional_mb(pid: int) -> float:
    """Memory of the tree, MB: pages that several processes share count once."""
    total = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return round(total * 1024 / 1e6, 1)


def _stat(pid: int) -> list[str]:
    """Fields of a process from its state on: the name before may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
