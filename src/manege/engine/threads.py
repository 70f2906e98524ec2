"""How many threads the tensor library may use, and that they soon sleep when they wait. Imports no torch.

`calm_threads` must run before torch is imported: OpenMP reads its environment once. Measured on two cores, a decode
step of 32 sequences on a quiet machine and beside one busy process: 121 and over 2000 ms as OpenMP comes (it spins for
milliseconds), 129 and 169 ms without spinning, 113 and 187 ms with a spin of about 50 microseconds, as long as the gap
between two operations of a forward pass.
"""

import os
import time
from pathlib import Path

__all__ = ["ThreadChoice", "calm_threads", "physical_cores"]

_SAMPLE_S = 2.0
"""Over less, other processes' CPU time is noise."""

_CALM = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}


def calm_threads() -> None:
    """Make idle OpenMP threads sleep soon, unless the environment says otherwise."""
    for key, value in _CALM.items():
        os.environ.setdefault(key, value)


class ThreadChoice:
    """Follows what others do on this machine; asked now and then by the thread that computes."""

    def __init__(self, asked: int | None) -> None:
        """`asked`: a fixed number; None: the physical cores that others leave free, at least one."""
        self._asked = asked
        self._cores = physical_cores()
        self._since = _used_s()

    def num_threads(self) -> int:
        """By the time that has passed since the last call; all cores until enough of it has."""
        if self._asked is not None:
            return self._asked
        now = _used_s()
        wall_s, others_s = (now[0] - self._since[0]), (now[1] - self._since[1])
        if wall_s < _SAMPLE_S:
            return self._cores
        self._since = now
        # Agents of our own count as others; up to half a core of them is no reason to leave one idle.
        return max(1, self._cores - int(others_s / wall_s + 0.4))


def _used_s() -> tuple[float, float]:
    """Seconds since the start of this machine, and CPU seconds that other processes have used in them."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):  # not Linux: nothing is known of others
        return time.monotonic(), 0.0
    idle_ticks = fields[3] + fields[4]
    busy_s = (sum(fields) - idle_ticks) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy_s - time.process_time()


def physical_cores() -> int:
    """Cores that this process may use; two hardware threads of one core count once."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = Path("/sys/devices/system/cpu")
    groups = set()
    for cpu in usable:
        try:
            groups.add((siblings / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:  # not Linux, or hidden: count every processor
            groups.add(str(cpu))
    return len(groups)
