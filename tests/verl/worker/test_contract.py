"""verl's training workers do what every train engine does."""

import pytest

from tests.contract.test_train_engine import *  # noqa: F403

pytestmark = pytest.mark.verl

del test_weights_are_published_in_memory_or_as_a_folder  # noqa: F821


@pytest.fixture
def make_engine(group_of_one, other_group_of_one):
    """At most two engines live at once."""
    groups = iter([group_of_one, other_group_of_one])
    return lambda **settings: next(groups).engine(**settings)
