"""Every part is killed in every phase in which it can be caught: the run ends, and nothing is lost or done twice."""

import signal
from dataclasses import dataclass

import pytest

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
    "gateway-streaming-SIGKILL-apart",
}


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
