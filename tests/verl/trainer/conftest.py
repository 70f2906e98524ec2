"""One Ray and one data set for all starts of verl's trainer."""

import pytest

from tests.verl.trainer.running import Trainings, ray_started, write_dataset


@pytest.fixture(scope="session")
def trainings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    write_dataset(folder)
    with ray_started(folder) as address:
        yield Trainings(address, folder)
