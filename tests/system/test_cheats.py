"""Cheats on a coding task: under all guards none pays and each is told, and honest work is paid under any."""

import pytest

from manege.sandbox.probe import probe
from tests.cheats import table
from tests.cheats.cells import GUARDS, measure
from tests.cheats.place import a_place
from tests.cheats.routes import CHEATS

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not (probe().confines and probe().notify), reason="; ".join(probe().missing())),
    pytest.mark.timeout(300),
]


async def test_under_all_guards_no_cheat_pays_each_is_told_and_honest_work_is_paid(client, tmp_path):
    """As the page says."""
    with a_place(tmp_path) as place:
        cells = await measure(client, place, table.ROWS, tuple(GUARDS))
    lines = dict(zip(table.ROWS, table.written().splitlines()[2:], strict=True))
    wrong = [name for name, cell in cells.items() if not lines[name].endswith(f" | {table.kinds(cell)} |")]
    assert not wrong, {name: (cells[name], lines[name]) for name in wrong}
    rewards = {name: cell.reward for name, cell in cells.items()}
    assert rewards == {"(honest work)": 1.0, **dict.fromkeys(CHEATS, 0.0)}, cells
    assert {name: cheat.told for name, cheat in CHEATS.items() if cheat.told not in cells[name].told} == {}
    assert cells["(honest work)"].told == {}


@pytest.mark.full
@pytest.mark.timeout(3000)
async def test_every_guard_stops_what_the_page_says(client, tmp_path):
    with a_place(tmp_path) as place:
        assert await table.measured(client, place) == table.written()
