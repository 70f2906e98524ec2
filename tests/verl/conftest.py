"""Tests with verl and Ray, in the environment of `make verl`."""

from pathlib import Path

import pytest

from manege.config import BackendConfig
from manege.trainer.engines.verl.environment import prepare

HERE = Path(__file__).parent

# The cases of every train engine run here, too.
pytest.register_assert_rewrite("tests.contract.test_train_engine")


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            # Of verl, Ray and transformers, which are not ours to mend.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            # Processes that import torch, transformers and Ray, on two cores.
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session", autouse=True)
def ranks_environment():
    """Of every rank; and set in this process before a test imports verl, and with it Ray, which reads it then."""
    return prepare(BackendConfig(kind="verl"), cpu=True)
