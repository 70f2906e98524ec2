"""One training in this process: a copy of the warm model, a `LocalEngine` that shares its weights, a `TorchEngine`.

Collect, `build_batch`, `step`, publish: the same order as `trainer/loop.py`, without gateway, controller and store.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from benchmarks.credit_ablation.collect import Player
from benchmarks.credit_ablation.tasks import KINDS, generate
from manege.config import CreditConfig, EngineConfig, TrainConfig
from manege.engine.local import LocalEngine
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.batch import Batch, build_batch
from manege.trainer.collect import Group
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from manege.types import PolicyVersion, Task

__all__ = ["SETTINGS", "TRAIN", "Trial", "to_batch"]

MODEL = Path(__file__).parent / "model"
SETTINGS: Mapping[str, CreditConfig] = {
    f"{level}/{weighting}": CreditConfig.model_validate({"level": level, "weighting": weighting})
    for level, weighting in (
        ("sample", "sample_mean"),
        ("sample", "token_mean"),
        ("rollout", "sample_mean"),
        ("rollout", "token_mean"),
        ("rollout", "rollout_mean"),
    )
}
"""Level of the advantage / weighting of the loss. The last one counts rollouts in both."""
TRAIN = TrainConfig(groups=4, group_size=8, learning_rate=5e-4, warmup_steps=0, micro_batch_tokens=4096)
NUM_TASKS, NUM_HELDOUT = 400, 64


class Trial:
    """A model that learns one kind of task; use it in `async with`, which ends its engine."""

    def __init__(self, kind: str, *, seed: int, train: TrainConfig = TRAIN) -> None:
        folder = open_folder(str(MODEL))
        self.model = load_model(folder)
        config = EngineConfig(max_batch=128, cache_tokens=128 * 128, prefill_chunk=2048, threads=1)
        self.engine = LocalEngine(self.model, folder, config=config, seed=seed, max_context=128)
        self.trainer = TorchEngine(self.model, folder, train)
        self._player, self._greedy = Player(self.engine, folder), Player(self.engine, folder, temperature=0.0)
        self._train, self._version, self._num_taken = train, 0, 0
        self._tasks = generate(split="train", num=NUM_TASKS, seed=seed, num_letters=KINDS[kind])
        self._heldout = generate(split="heldout", num=NUM_HELDOUT, seed=0, num_letters=KINDS[kind])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def collect(self, num_batches: int = 1) -> Sequence[Sequence[Group]]:
        """Groups for so many steps, of the present policy."""
        tasks = [self._next_task() for _ in range(num_batches * self._train.groups)]
        groups = await self._player.groups(tasks, self._train.group_size)
        size = self._train.groups
        return [groups[start : start + size] for start in range(0, len(groups), size)]

    async def update(self, batch: Batch, credit: CreditConfig) -> None:
        """One optimiser step, and its weights in service; nothing without a gradient."""
        if not batch.samples:
            return
        await self.engine.pause()
        self.trainer.step(batch.samples, objective_of(credit))
        self._version += 1
        await self.engine.load(self.trainer.publish(), PolicyVersion(self._version))
        await self.engine.resume()

    async def evaluate(self, *, greedy: bool) -> float:
        """Success on the held-out tasks, one rollout each."""
        groups = await (self._greedy if greedy else self._player).groups(self._heldout, 1)
        return sum(group.rollouts[0].reward or 0.0 for group in groups) / len(groups)

    def _next_task(self) -> Task:
        self._num_taken += 1
        return self._tasks[(self._num_taken - 1) % len(self._tasks)]


def to_batch(groups: Sequence[Group], credit: CreditConfig) -> Batch:
    """The trainer's own way from groups to weighted samples."""
    return build_batch(groups, credit, success_reward=1.0, rng=random.Random(0))
