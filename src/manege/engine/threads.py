"""How many threads the tensor library may use, and that they soon sleep when they wait. Imports no torch.

`calm_threads` must run before torch is imported: OpenMP reads its environment once. Measured on two cores, a decode
step of 32 sequences on a quiet machine and beside one busy process: 121 and over 2000 ms as OpenMP comes (it spins for
milliseconds), 129 and 169 ms without spinning, 113 and 187 ms with a spin of about 50 microseconds, as long as the gap
between two operations of a forward pass.
"""

import os
from pathlib import Path

__all__ = ["calm_threads", "choose_num_threads"]

_CALM = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}


def calm_threads() -> None:
    """Make idle OpenMP threads sleep soon, unless the environment says otherwise."""
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
