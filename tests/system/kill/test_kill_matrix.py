"""Every part is killed in every phase in which it can be caught: the run ends, and nothing is lost or done twice."""

import signal
import time
from dataclasses import dataclass

import pytest

from tests import postgres
from tests.system.kill import phases
from tests.system.kill.checks import check
from tests.system.kill.site import Site

TERM, KILL = signal.SIGTERM, signal.SIGKILL


@dataclass(frozen=True)
class Cell:
    victim: str
    phase: str
    number: signal.Signals
    apart: bool

    def __str__(self):
        return f"{self.victim}-{self.phase}-{self.number.name}-{'apart' if self.apart else 'together'}"


PHASES = {
    "gateway": ["queued", "starting", "in_flight", "streaming", "held", "updating", "scoring", "saving"],
    "controller": ["queued", "starting", "in_flight", "streaming", "held", "scoring"],
    "trainer": ["queued", "in_flight", "held", "updating", "scoring", "saving"],
    "engine": ["queued", "in_flight", "streaming", "held", "updating"],
    "agent": ["idle", "in_flight", "streaming", "held"],
    "scorer": ["scoring"],
}
"""With each part in a process of its own."""
TOGETHER = {
    "all": ["queued", "starting", "in_flight", "streaming", "held", "scoring", "saving"],
    "agent": ["in_flight"],
    "scorer": ["scoring"],
}
"""With all parts in one process, which is killed."""
CELLS = [
    Cell(victim, phase, number, apart)
    for apart, table in ((True, PHASES), (False, TOGETHER))
    for victim, names in table.items()
    for phase in names
    for number in (TERM, KILL)
]
IN_CI = {
    "gateway-queued-SIGTERM-apart",
    "gateway-streaming-SIGKILL-apart",
    "gateway-updating-SIGKILL-apart",
    "controller-in_flight-SIGKILL-apart",
    "controller-scoring-SIGTERM-apart",
    "trainer-updating-SIGKILL-apart",
    "trainer-saving-SIGKILL-apart",
    "engine-in_flight-SIGKILL-apart",
    "agent-in_flight-SIGKILL-apart",
    "scorer-scoring-SIGKILL-apart",
    "all-streaming-SIGKILL-together",
    "all-saving-SIGKILL-together",
}
AWAY_S = 10
"""How long PostgreSQL is away."""


def marked(cell):
    return pytest.param(cell, id=str(cell), marks=[] if str(cell) in IN_CI else pytest.mark.full)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("cell", [marked(cell) for cell in CELLS])
def test_after_a_kill_the_run_ends_and_nothing_is_lost(tmp_path, cell):
    steps = 6 if cell.phase in ("updating", "saving") else 2
    with Site(tmp_path, apart=cell.apart, slots=1 if cell.phase == "queued" else 4, steps=steps) as site:
        getattr(phases, cell.phase)(site)
        site.kill(cell.victim, cell.number)
        site.release()
        site.finish()
        check(site, blamed=cell.victim in ("agent", "scorer"))


def test_the_cells_in_ci_are_cells():
    assert {str(cell) for cell in CELLS} >= IN_CI


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "phase",
    [pytest.param(name, marks=[] if name == "streaming" else pytest.mark.full) for name in PHASES["controller"]],
)
def test_after_postgresql_was_away_the_run_ends_and_nothing_is_lost(tmp_path, phase):
    with (
        postgres.server() as server,
        Site(tmp_path, apart=True, slots=1 if phase == "queued" else 4, store=server.url) as site,
    ):
        getattr(phases, phase)(site)
        server.stop("immediate")
        time.sleep(AWAY_S)
        server.start()
        site.release()
        site.finish()
        check(site)
