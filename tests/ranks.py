"""Two data-parallel ranks: real processes that each take half of a batch and add up their gradients."""

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.multiprocessing


@contextmanager
def two_ranks(folder, make_engine):
    """Yields `gradient(batch, objective)`, computed by two processes; `make_engine` is a module's function."""
    context = torch.multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=_work, args=(rank, f"file://{folder}/rendezvous", theirs, make_engine), daemon=True)
        for rank, (_, theirs) in enumerate(ends)
    ]
    for process, (_, theirs) in zip(processes, ends, strict=True):
        process.start()
        theirs.close()  # so that the end of a process is seen at ours

    def gradient(batch, objective):
        for rank, (ours, _) in enumerate(ends):
            ours.send((batch[rank::2], objective))
        first, second = (torch.from_numpy(ours.recv()) for ours, _ in ends)
        assert torch.equal(first, second)
        return first

    try:
        yield gradient
    finally:
        for ours, _ in ends:
            ours.send(None)
        for process in processes:
            process.join(timeout=30)


def _work(rank, rendezvous, pipe, make_engine):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    engine, parameters = make_engine()
    while (work := pipe.recv()) is not None:
        total = accumulated(engine, parameters, *work)
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        pipe.send(total.numpy())
    dist.destroy_process_group()


def accumulated(engine, parameters, batch, objective):
    """The gradient of a batch, flat; zero for an empty one."""
    for parameter in parameters:
        parameter.grad = None
    engine.accumulate(batch, objective)
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
