"""How many threads the tensor library may use, and that they sleep when they wait. Imports no torch.

`calm_threads` must run before torch is imported: OpenMP reads its environment once. Two spinning threads that share a
core with anything else slow each other down tenfold (measured: 3.2 s instead of 0.2 s per decode step).
"""

import os
from pathlib import Path

__all__ = ["calm_threads", "choose_num_threads"]

_CALM = {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "PASSIVE"}


def calm_threads() -> None:
    """Make idle OpenMP threads sleep instead of spin, unless the environment says otherwise."""
    for key, value in _CALM.items():
        os.environ.setdefault(key, value)


def choose_num_threads(asked: int | None) -> int:
    """What was asked for, else the physical cores that others leave free, at least one."""
    if asked is not None:
        return asked
    cores = _physical_cores()
    # A load below one half is noise: a lone daemon must not halve a two-core machine.
    return max(1, cores - round(os.getloadavg()[0] - 0.01))


def _physical_cores() -> int:
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = Path("/sys/devices/system/cpu")
    groups = set()
    for cpu in usable:
        try:
            groups.add((siblings / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:  # not Linux, or hidden: count every processor
            groups.add(str(cpu))
    return len(groups)
