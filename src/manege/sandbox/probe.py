"""What this machine can isolate, and whether that is enough to start a run.

`probe` asks the kernel; `require` compares the answer with the run's setting. Imports on every system, Windows
included, so that it can refuse there.
"""

import sys

from manege.config import SandboxConfig
from manege.errors import SandboxError
from manege.sandbox.landlock import landlock_abi
from manege.sandbox.layers import Layers
from manege.sandbox.seccomp import has_seccomp

__all__ = ["probe", "require"]


def probe() -> Layers:
    """Ask this machine."""
    return Layers(system=sys.platform, landlock_abi=landlock_abi(), seccomp=has_seccomp())


def require(config: SandboxConfig, layers: Layers) -> Layers:
    """The layers to enforce under this setting. Raises SandboxError if they do not isolate, unless that is accepted."""
    if layers.system == "win32":
        raise SandboxError("native Windows cannot run agents: install WSL (`wsl --install`) and start manege inside it")
    enforced = layers if config.mode == "auto" else Layers(system=layers.system, landlock_abi=0, seccomp=False)
    if enforced.isolates or config.unsafe:
        return enforced
    why = "sandbox.mode is off" if config.mode == "off" else "; ".join(layers.missing())
    raise SandboxError(
        f"agents would run without isolation ({why}); accept that with --unsafe (sandbox.unsafe = true), "
        "or run on Linux 5.13 or newer with Landlock enabled"
    )
