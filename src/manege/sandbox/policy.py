"""What an agent may touch, and the order in which that is enforced on a process.

A Policy is made by the controller (workspace, gateway port) and applied by the child after its fork and before the
agent's first instruction. Everything that is not listed is unreadable, home folders and the run folder included.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from manege.sandbox import landlock, seccomp
from manege.sandbox.layers import Layers
from manege.sandbox.syscalls import ARCH, PR_SET_NO_NEW_PRIVS, drop_capabilities, is_linux, prctl

__all__ = ["Policy", "apply", "code_paths", "command_paths", "interpreter_paths"]

# Files of /etc are listed one by one: host keys and password hashes lie there too.
# fmt: off
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt",
    "/etc/alternatives", "/etc/ca-certificates", "/etc/group", "/etc/hosts", "/etc/ld.so.cache", "/etc/localtime",
    "/etc/magic", "/etc/mime.types", "/etc/nsswitch.conf", "/etc/passwd", "/etc/pki/tls", "/etc/resolv.conf",
    "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/terminfo",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system/cpu",
)
_DEVICES = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The isolation of one attempt."""

    layers: Layers
    """What to enforce: the layers that `probe` found, or none."""
    writable: Sequence[str]
    """Folders to read, write and run programs in: the workspace and private scratch folders."""
    readable: Sequence[str]
    """Files and folders to read and run programs from, beside system folders and the interpreter."""
    tcp_ports: Sequence[int]
    """The gateway's port, the only one to connect to (on any host: Landlock knows ports, not addresses)."""
    protected_pids: Sequence[int]
    """Processes that may not be signalled even where Landlock cannot scope signals: the controller."""


def apply(policy: Policy, *, code: Iterable[str]) -> None:
    """Restrict this process for good. `code`: files and folders of interpreter and agent. Raises OSError."""
    if not is_linux():
        return
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if os.geteuid() == 0:
        drop_capabilities()
    layers = policy.layers
    if layers.landlock_abi:
        landlock.restrict(
            abi=layers.landlock_abi,
            readable=[*_SYSTEM, *code, *policy.readable],
            writable=[*_DEVICES, *policy.writable],
            tcp_ports=policy.tcp_ports,
        )
    if layers.seccomp and ARCH is not None:
        seccomp.install(seccomp.build_filter(ARCH, protected_pids=[os.getppid(), *policy.protected_pids]))


def interpreter_paths() -> Sequence[str]:
    """Where this Python and its packages live, which may be below a home folder or in the project's folder."""
    return sorted({sys.prefix, sys.base_prefix, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def command_paths(argv: Sequence[str], search_path: str) -> Sequence[str]:
    """Code of a command: its executable, and its arguments that are absolute paths of files."""
    executable = shutil.which(argv[0], path=search_path)
    files = [executable, *(argument for argument in argv[1:] if os.path.isabs(argument))]
    return [os.path.realpath(file) for file in files if file and os.path.isfile(file)]


def code_paths() -> Sequence[str]:
    """Code outside the interpreter that this process has imported: packages as folders, single modules as files."""
    covered = [path + os.sep for path in interpreter_paths()]
    found: list[str] = []
    modules = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
    for module in sorted(modules, key=lambda module: str(module.__file__)):
        location = str(module.__file__)
        if not location.startswith(tuple(covered)):
            path = os.path.dirname(location) if hasattr(module, "__path__") else location
            found.append(path)
            covered.append(path + os.sep)
    return found
