"""The ranks of a run over the tiny model: rank 0 in this process, the others started as `manege train` starts them."""

from contextlib import contextmanager
from pathlib import Path

import psutil

from manege.backend_config import BackendConfig
from manege.cli.ranks import Ranks
from manege.config import ModelConfig, load_config
from manege.model.folder import open_folder
from manege.model.load import load_model

TINY = Path(__file__).parent / "tiny"
FOLDER = open_folder(str(TINY / "model"))


def config_of(num_ranks, timeout_s=60, model=None, **train):
    config = load_config(TINY / "run.toml", ["credit.kl=0.1"])
    changes = {
        "backend": BackendConfig(ranks_per_node=num_ranks, timeout_s=timeout_s),
        "model": ModelConfig(path=str(model or FOLDER.path), device="cpu"),
        "train": config.train.model_copy(update={"learning_rate": 1e-3, "warmup_steps": 0, **train}),
    }
    return config.model_copy(update=changes)


@contextmanager
def started(folder, config, *, serves=False):
    """The ranks, and what they joined to: the train engine with rank 0's model, the other ranks' inference engines. One
    at a time in a process."""
    ranks = Ranks(config, folder / "meeting", serves=serves)
    try:
        model = load_model(FOLDER)
        engine, others = ranks.join(model, FOLDER, reference=True, publish_folder=None)
        yield ranks, engine, model, others
    finally:
        ranks.close()
    assert not any(psutil.pid_exists(process.pid) for process in ranks.processes)
