"""A store on each database, and time that tests move; a server of vLLM for a whole session."""

import pytest

from manege.store.sql import SqlStore
from tests.conftest import TINY_MODEL


class Clock:
    """Seconds since the epoch, as a test sets them."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    return tmp_path / "store.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
async def store(url, clock):
    opened = await SqlStore.open(url, clock=clock)
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory):
    """Serves the tiny model."""
    # It imports torch.
    from tests.vllm.serving import served

    with served(TINY_MODEL, tmp_path_factory.mktemp("vllm")) as url:
        yield url
