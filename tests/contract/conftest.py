"""A store on each database, and time that tests move."""

import pytest

from manege.store.sql import SqlStore


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
