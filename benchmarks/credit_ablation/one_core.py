"""Keep a study on one core: its models are so small that a second thread only costs, above all on a busy machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_core"]


@contextmanager
def one_core() -> Iterator[None]:
    """The last core of those that this thread may use; `taskset` chooses another."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)
