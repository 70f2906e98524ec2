"""One side of the benchmark of sample building, in a process of its own.

For every line on stdin the side reads the rollouts from the file, gives them the form in which it gets them (not
timed), builds, and prints one line of JSON: seconds by the clock and of CPU, the highest memory above that before (of
the resident set, so that it counts what numpy and torch allocate; Linux only), and what came out. The input is made
anew for every repeat, since the reference's adapter appends to the lists that it is given.
"""

import contextlib
import ctypes
import gc
import io
import json
import re
import sys
import time
from pathlib import Path

from sample_building_rollouts import read_rollouts

__all__ = ["serve"]


def serve(load, build):
    """`load`: rollouts and rewards to a side's input; `build`: from there to a dict with what came out."""
    for _ in sys.stdin:
        loaded = load(*read_rollouts(sys.argv[1]))
        before = _settled_memory()
        with contextlib.redirect_stdout(io.StringIO()):  # the reference prints
            started, started_cpu = time.perf_counter(), time.process_time()
            result = build(loaded)
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        peak = _memory("VmHWM") - before
        del loaded
        measured = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak}
        print(json.dumps(measured | result), flush=True)


def _settled_memory():
    """Bytes resident now; what is free is given back before, and the highest mark is set to it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field):
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024
