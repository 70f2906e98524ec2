"""One Ray and three groups of ranks for all tests of worker mode: a group takes a minute to start.

An engine of a test is new all the same: its ranks load what was saved before the first step.
"""

import dataclasses
from contextlib import ExitStack
from pathlib import Path

import pytest

from manege.config import CreditConfig, RunConfig
from manege.model.folder import open_folder

MODEL = open_folder(str(Path(__file__).parents[2] / "tiny" / "model"))
LEARNING_RATE = 1e-3


def run_config(folder, *, ranks=1, backend=None, kl=0.1, **train):
    tasks = {"train": "tiny_tasks:generate", "num_train": 8}
    return RunConfig.model_validate(
        {
            "name": "tiny",
            "folder": str(folder),
            "model": {"path": str(MODEL.path), "device": "cpu"},
            "tasks": tasks,
            "agent": {"run": "tiny_agent:main"},
            "scorer": {"run": "tiny_tasks:score"},
            "credit": {"kl": kl},
            "train": {"learning_rate": LEARNING_RATE, "warmup_steps": 0, "micro_batch_tokens": 32, **train},
            "backend": {"kind": "verl", "ranks_per_node": ranks, "timeout_s": 900, **(backend or {})},
        }
    )


@dataclasses.dataclass
class Group:
    """Ranks, and what they were at first."""

    config: RunConfig
    ranks: object
    first: Path

    def engine(self, *, reference=False, **train):
        from manege.trainer.engines.verl.engine import VerlEngine

        config = self.config.model_copy(update={"train": self.config.train.model_copy(update=train)})
        engine = VerlEngine(self.ranks, config, MODEL, base_rate=LEARNING_RATE, reference=reference)
        if self.first.exists():
            engine.load(self.first)
        else:
            engine.save(self.first)
        return engine


@pytest.fixture(scope="session")
def start_ranks(ranks_environment, tmp_path_factory):
    """`start_ranks(ranks, ...)`: a group in a Ray that all share, ended with the tests."""
    from manege.trainer.engines.verl.cluster import ray_session
    from manege.trainer.engines.verl.ranks import started_ranks
    from manege.trainer.engines.verl.settings import worker_config

    with ExitStack() as stack:
        # As many logical GPUs as all groups have ranks, those included that failures leave behind.
        stack.enter_context(ray_session(run_config("runs", ranks=12).backend, ranks_environment, cpu=True))

        def start(ranks, *, stack=stack, **backend):
            folder = tmp_path_factory.mktemp("run")
            config = run_config(folder, ranks=ranks, backend=backend)
            settings = worker_config(config, MODEL, cpu=True)
            started = started_ranks(config.backend, settings, ranks_environment, keep_reference=True)
            return Group(config, stack.enter_context(started), folder / "first")

        yield start


@pytest.fixture(scope="session")
def group_of_one(start_ranks):
    return start_ranks(1)


@pytest.fixture(scope="session")
def other_group_of_one(start_ranks):
    return start_ranks(1)


@pytest.fixture(scope="session")
def group_of_two(start_ranks):
    return start_ranks(2)


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def group(request):
    return request.getfixturevalue("group_of_one" if request.param == 1 else "group_of_two")


@pytest.fixture
def credit():
    return CreditConfig(clip_high=0.28)
