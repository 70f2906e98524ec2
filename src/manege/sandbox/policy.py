"""What an agent may touch, and the order in which that is enforced on a process.

A Policy is made by the controller (workspace, gateway port) and applied by the child after its fork and before the
agent's first instruction. Everything that is not listed is unreadable, home folders and the run folder included.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from manege.sandbox import landlock, mounts, seccomp
from manege.sandbox.layers import Layers
from manege.sandbox.syscalls import ARCH, PR_SET_NO_NEW_PRIVS, drop_capabilities, is_linux, prctl

__all__ = ["Policy", "apply", "system_paths"]

# Files of /etc are listed one by one: host keys and password hashes lie there too. Of /proc/self, the first program of
# an agent gets `maps`: JavaScript engines abort when they cannot find their stack there.
# fmt: off
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt",
    "/etc/alternatives", "/etc/bash.bashrc", "/etc/bashrc", "/etc/ca-certificates", "/etc/group", "/etc/hosts",
    "/etc/ld.so.cache", "/etc/localtime", "/etc/magic", "/etc/mime.types",
    "/etc/nsswitch.conf", "/etc/passwd", "/etc/pki/tls", "/etc/resolv.conf",
    "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/terminfo",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/self/maps", "/proc/stat", "/sys/devices/system/cpu",
)
_GENERATED = ("/etc/group", "/etc/passwd")
"""A root of its own has its own."""
_NETWORK = ("/etc/hosts", "/etc/resolv.conf")
_DEVICES = (
    "/dev/full", "/dev/null", "/dev/random", "/dev/stderr", "/dev/stdin", "/dev/stdout", "/dev/urandom", "/dev/zero",
)
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
    private: Sequence[str]
    """Files and folders that stay unreadable even inside a readable folder: the run folder and its keys, task files."""
    tcp_ports: Sequence[int]
    """The gateway's port, the only one to connect to (on any host: Landlock knows ports, not addresses)."""
    protected_pids: Sequence[int]
    """Processes that may not be signalled even where Landlock cannot scope signals: the controller."""
    terminals: bool = False
    """Whether it gets pseudo-terminals of its own; without, it has none."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders at a fixed place, and the private folder that it finds there."""
    listen_port: int | None = None
    """With namespaces: the port of its 127.0.0.1 that answers, whose listening socket goes to the launcher; None:
    nothing answers."""
    host_network: bool = False
    """Whether it stays in the network of this machine: for a scorer that asks a judge."""
    uid: int | None = None
    """With `layers.uids`: the user that it is outside; owns `writable`. None: ours."""

    @property
    def own_network(self) -> bool:
        """Whether it has a network namespace: not where it needs this machine's network, or a port there."""
        reaches_gateway = self.listen_port is None and self.tcp_ports
        return self.layers.apart and not self.host_network and not reaches_gateway


def system_paths(policy: Policy) -> Sequence[str]:
    """What a root of its own shows of this machine's system."""
    left_out = (*_GENERATED, *(() if policy.host_network else _NETWORK))
    return [path for path in _SYSTEM if path not in left_out and not path.startswith("/proc/")]


def apply(policy: Policy, *, code: Iterable[str], listable: Iterable[str] = ()) -> None:
    """Restrict this process for good. `code`: files and folders of interpreter and agent; `listable`: folders whose
    names, not files, it may read. Raises OSError."""
    if not is_linux():
        return
    layers = policy.layers
    if layers.landlock_abi and not layers.apart and (policy.terminals or policy.folders):
        mounts.change_view(terminals=policy.terminals, folders=policy.folders)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_capabilities()
    if layers.landlock_abi:
        readable, listed = _readable(policy, code)
        landlock.restrict(
            abi=layers.landlock_abi,
            readable=readable,
            listable=[*listable, *listed],
            writable=[*_DEVICES, *policy.writable, *_more_writable(policy)],
            tcp_ports=None if policy.own_network or policy.host_network else policy.tcp_ports,
        )
    if layers.seccomp and ARCH is not None:
        seccomp.install(
            seccomp.build_filter(
                ARCH,
                protected_pids=[1] if layers.apart else [os.getppid(), *policy.protected_pids],
                unix=policy.own_network,
                udp=policy.host_network,
            )
        )


def _readable(policy: Policy, code: Iterable[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Folders and files to read, and folders to list. In a root of its own there is nothing else."""
    if policy.layers.apart:
        return ["/"], []
    private = [os.path.realpath(path) for path in policy.private]
    parts = [_split(path, private) for path in (*_SYSTEM, *code, *policy.readable)]
    return [path for readable, _ in parts for path in readable], [path for _, listed in parts for path in listed]


def _more_writable(policy: Policy) -> Sequence[str]:
    own_root = ("/dev/shm", "/dev/tty", "/tmp") if policy.layers.apart else ()
    return [*policy.folders, *(mounts.TERMINALS if policy.terminals else ()), *own_root]


def _split(path: str, private: Iterable[str]) -> tuple[Sequence[str], Sequence[str]]:
    """A path as what may be read of it and what only be listed, since Landlock cannot take a right back: a folder that
    holds something private falls apart into its entries."""
    path = os.path.realpath(path)
    if path in private:
        return [], []
    if not any(inner.startswith(path.rstrip(os.sep) + os.sep) for inner in private):
        return [path], []
    parts = [_split(entry.path, private) for entry in os.scandir(path) if not entry.is_symlink()]
    return [file for part, _ in parts for file in part], [path, *(folder for _, part in parts for folder in part)]
