"""When a run may start, and what is said about layers that are missing."""

import pytest

from manege.config import SandboxConfig
from manege.errors import SandboxError
from manege.sandbox.layers import Layers
from manege.sandbox.probe import require

FULL = Layers(system="linux", landlock_abi=7, seccomp=True)
NO_LANDLOCK = Layers(system="linux", landlock_abi=0, seccomp=True)
NO_SECCOMP = Layers(system="linux", landlock_abi=7, seccomp=False)
MACOS = Layers(system="darwin", landlock_abi=0, seccomp=False)
WINDOWS = Layers(system="win32", landlock_abi=0, seccomp=False)


@pytest.mark.parametrize(
    ("layers", "config", "enforced"),
    [
        (FULL, {}, FULL),
        (NO_LANDLOCK, {"unsafe": True}, NO_LANDLOCK),
        (FULL, {"mode": "off", "unsafe": True}, Layers(system="linux", landlock_abi=0, seccomp=False)),
        (MACOS, {"unsafe": True}, MACOS),
    ],
    ids=["full", "no landlock, accepted", "off, accepted", "macos, accepted"],
)
def test_what_is_enforced(layers, config, enforced):
    assert require(SandboxConfig(**config), layers) == enforced


@pytest.mark.parametrize(
    ("layers", "config", "message"),
    [
        (NO_LANDLOCK, {}, "no Landlock.*--unsafe"),
        (NO_SECCOMP, {}, "no seccomp.*--unsafe"),
        (MACOS, {}, "no isolation on darwin.*--unsafe"),
        (FULL, {"mode": "off"}, "sandbox.mode is off.*--unsafe"),
        (WINDOWS, {"unsafe": True}, "wsl --install"),
    ],
    ids=["no landlock", "no seccomp", "macos", "off", "windows"],
)
def test_a_run_without_isolation_is_refused(layers, config, message):
    with pytest.raises(SandboxError, match=message):
        require(SandboxConfig(**config), layers)


@pytest.mark.parametrize(
    ("abi", "lines"), [(7, 1), (5, 2), (3, 3), (2, 4), (0, 2)], ids=["7", "5", "3", "2", "no landlock"]
)
def test_each_missing_layer_has_a_line(abi, lines):
    missing = Layers(system="linux", landlock_abi=abi, seccomp=True).missing()
    assert len(missing) == lines
    assert all("agents can" in line for line in missing)
