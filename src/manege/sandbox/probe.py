"""What this machine can isolate, and whether that is enough to start a run.

`probe` asks the kernel, mostly by trying; `require` compares the answer with the run's setting. Imports on every
system, Windows included, so that it can refuse there.
"""

import functools
import sys
from dataclasses import replace

from manege.config import SandboxConfig
from manege.errors import SandboxError
from manege.sandbox.landlock import landlock_abi
from manege.sandbox.layers import Layers
from manege.sandbox.seccomp import has_seccomp

__all__ = ["probe", "require"]


@functools.cache
def probe() -> Layers:
    """Ask this machine, once per process."""
    layers = Layers(system=sys.platform, landlock_abi=landlock_abi(), seccomp=has_seccomp())
    if layers.system != "linux":
        return layers
    from manege.sandbox import bubblewrap, cgroups, trial, uids, watch  # these need modules that Windows lacks

    layers = replace(layers, cgroup=cgroups.find(), notify=watch.available())
    if trial.starts(replace(layers, namespaces=True), overlay=True):
        return replace(layers, namespaces=True, overlay=True, uids=uids.available())
    if trial.starts(replace(layers, namespaces=True), overlay=False):
        return replace(layers, namespaces=True, uids=uids.available())
    return replace(layers, bubblewrap=bubblewrap.available())


def require(config: SandboxConfig, layers: Layers) -> Layers:
    """The layers to enforce under this setting. Raises SandboxError if they do not isolate, unless that is accepted, or
    if they are not all that `strict` wants."""
    if layers.system == "win32":
        raise SandboxError("native Windows cannot run agents: install WSL (`wsl --install`) and start manege inside it")
    if config.mode == "strict" and not layers.confines:
        raise SandboxError(
            f"sandbox.mode is strict, and this machine lacks layers: {'; '.join(layers.missing())}. Run on Linux with "
            "Landlock and user namespaces (or bubblewrap), or set sandbox.mode to auto"
        )
    enforced = Layers(system=layers.system, landlock_abi=0, seccomp=False) if config.mode == "off" else layers
    if enforced.isolates or config.unsafe:
        return enforced
    why = "sandbox.mode is off" if config.mode == "off" else "; ".join(layers.missing())
    raise SandboxError(
        f"agents would run without isolation ({why}); accept that with --unsafe (sandbox.unsafe = true), "
        "or run on Linux 5.13 or newer with Landlock enabled"
    )
