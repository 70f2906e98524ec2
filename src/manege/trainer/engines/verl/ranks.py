"""The ranks as the driver sees them: one call for all, each with its own arguments, within a time.

A rank that died, a machine that is gone, a collective that hangs and an error in one rank end the group: the others
wait in a collective that will not come, or have other weights. The error names the rank that failed first; a run goes
on from its last checkpoint.
"""

# pyright: reportMissingImports=false
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import sort_placement_group_by_node_ip
from verl.utils.device import get_device_name
from verl.workers.config import TrainingWorkerConfig

from manege.config import BackendConfig
from manege.errors import TrainerError
from manege.trainer.engines.verl.cluster import meeting_place, places
from manege.trainer.engines.verl.worker import Place, RankWorker

__all__ = ["Ranks", "started_ranks"]

_CAUSE_S = 5.0
"""A rank that died is noticed that much later, at most, than the others' broken connections to it."""


class Ranks:
    """Of one run; `started_ranks` makes them."""

    def __init__(self, workers: Sequence[Any], *, timeout_s: float, are_here: bool) -> None:
        """`are_here`: on this machine, in a Ray of our own."""
        self.workers, self._timeout_s, self._are_here = workers, timeout_s, are_here
        self._lost: TrainerError | None = None
        self.places: Sequence[Place] = []
        self.places = self.call("place")

    @property
    def num_shares(self) -> int:
        """Data-parallel ranks."""
        return max(place.data_rank for place in self.places) + 1

    def call(self, method: str, *arguments: Any, shares: Sequence[Any] | None = None) -> list[Any]:
        """What each rank answers, in their order. `shares`: the first argument of each data-parallel rank. Raises
        TrainerError, and from then on always."""
        if self._lost is not None:
            raise self._lost
        started = time.monotonic()
        asked = []
        for rank, worker in enumerate(self.workers):
            own = () if shares is None else (shares[self.places[rank].data_rank],)
            asked.append(getattr(worker, method).remote(*own, *arguments))
        waiting = list(asked)
        while waiting:
            left_s = self._timeout_s - (time.monotonic() - started)
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, left_s))
            if not done:
                hung = ", ".join(self._named(asked.index(each)) for each in waiting)
                raise self._end(
                    f"`{method}` took longer than backend.timeout_s = {self._timeout_s:g} s on ranks {hung} of "
                    f"{len(asked)}: a rank or a collective hangs"
                )
            try:
                ray.get(done)
            except RayError as error:
                raise self._end(self._cause(method, asked, error)) from error
        return ray.get(asked)

    def answers(self, method: str, *arguments: Any, shares: Sequence[Any]) -> list[Any]:
        """One per share: of the ranks that answer."""
        found: dict[int, Any] = {}
        for place, answer in zip(self.places, self.call(method, *arguments, shares=shares), strict=True):
            if place.answers:
                found[place.data_rank] = answer
        return [found[share] for share in range(self.num_shares)]

    def end(self) -> None:
        """Kill them; safe to repeat."""
        for worker in self.workers:
            # Their machine, or Ray, may be gone.
            with suppress(Exception):
                ray.kill(worker)
        if self._are_here:
            for place in self.places:
                # One that was stopped does not hear of it.
                with suppress(ProcessLookupError):
                    if _is_worker(place.pid):
                        os.kill(place.pid, signal.SIGKILL)

    def _end(self, reason: str) -> TrainerError:
        self._lost = TrainerError(f"verl: {reason}; the run can go on from its last checkpoint with --resume")
        self.end()
        return self._lost

    def _named(self, rank: int) -> str:
        """With its machine, once that is known."""
        return f"{rank} ({self.places[rank].machine})" if self.places else str(rank)

    def _cause(self, method: str, asked: Sequence[Any], first: RayError) -> str:
        """A rank that died breaks the others' connections, and they may tell of it first."""
        failed: dict[int, RayError] = {}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_CAUSE_S)
        for answer in done:
            try:
                ray.get(answer)
            except RayError as error:
                failed[asked.index(answer)] = error
        for rank, error in failed.items():
            if isinstance(error, RayActorError):
                return f"rank {self._named(rank)} of {len(asked)} died in `{method}`: {_first_line(error)}"
        rank, error = next(iter(failed.items()), (0, first))
        cause = error.cause if isinstance(error, RayTaskError) else error
        reason = f"{type(cause).__name__}: {_first_line(cause)}"
        return f"rank {self._named(rank)} of {len(asked)} failed in `{method}`: {reason}"


@contextmanager
def started_ranks(
    backend: BackendConfig, config: TrainingWorkerConfig, environment: Mapping[str, str], *, keep_reference: bool
) -> Iterator[Ranks]:
    """With the model loaded; they are gone afterwards. Raises TrainerError."""
    with places(backend) as groups:
        pool = RayResourcePool([backend.ranks_per_node] * backend.nodes, use_gpu=True, max_colocate_count=1)
        pool.pgs = sort_placement_group_by_node_ip(list(groups))
        address, port = meeting_place(pool.pgs[0])
        workers = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=RayClassWithInitArgs(ray.remote(RankWorker), config, keep_reference=keep_reference),
            device_name=get_device_name(),
            worker_env=dict(environment),
            master_addr=address,
            master_port=port,
        ).workers
        ranks = None
        try:
            ranks = Ranks(workers, timeout_s=backend.timeout_s, are_here=backend.ray_address is None)
            yield ranks
        finally:
            if ranks is not None:
                ranks.end()


def _is_worker(pid: int) -> bool:
    """Still the actor, and no other process under its number."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"ray::")
    except OSError:
        return False


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
