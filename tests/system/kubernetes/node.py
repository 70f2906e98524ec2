"""A real node of the tests' cluster: kubelet, containerd, runc and a bridge that leads nowhere, in namespaces of their
own, with the scheduler beside it. It needs root.

The namespaces hold everything: with their first process all containers, the bridge and the mounts are gone. Nothing
inside has a route out; what pods may reach is relayed (`expose`) from the bridge's address to a port of this machine's
loopback, and the API server is relayed to the kubelet likewise.
"""

import asyncio
import contextlib
import ctypes
import os
import select
import socket
import subprocess
import threading
import time
from pathlib import Path

from tests.system.kubernetes.cluster import built, free_port

ADDRESS = "10.244.0.1"
NAME = "node"
PAUSE = "registry.local/pause:1"
_READY_S = 90
_CLONE_NEWNET = 0x40000000

_CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{root}/usr/sbin/runc"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{root}/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""
"""The kernel may not let us lower the scores by which it chooses what to kill, hence restrict_oom_score_adj."""

_BRIDGE = """\
{{"cniVersion": "0.4.0", "name": "tests", "plugins": [{{"type": "bridge", "bridge": "cni0", "isGateway": true,
  "isDefaultGateway": false, "ipMasq": false, "ipam": {{"type": "host-local", "dataDir": "/run/addresses",
  "ranges": [[{{"subnet": "10.244.0.0/24", "gateway": "{address}"}}]]}}}}]}}
"""

_SCRIPT = """\
set -e
busybox=$1 folder=$2
for place in /run /var/log /var/lib/cni; do mkdir -p $place; $busybox mount -t tmpfs tmpfs $place; done
$busybox ifconfig lo 127.0.0.1 up
$busybox brctl addbr cni0
$busybox ifconfig cni0 {address} netmask 255.255.255.0 up
echo open
read -r go
containerd --config "$folder/containerd.toml" > "$folder/containerd.log" 2>&1 &
until ctr -a /run/containerd.sock version > /dev/null 2>&1; do $busybox sleep 0.1; done
for image in "$folder"/images/*.tar; do ctr -a /run/containerd.sock -n k8s.io images import "$image"; done >&2
echo serving
shift 2
exec "$@" > "$folder/kubelet.log" 2>&1
"""


class Node:
    """`with Node(cluster, folder, images) as node`: ready for pods; afterwards nothing of it is left."""

    def __init__(self, cluster, folder, images):
        """`images`: archives, of which one is that of `PAUSE`, which only sleeps."""
        self._cluster, self._folder, self._images = cluster, folder, images
        self._root = built() / "root"
        self._holder = None
        self._inside = self._first = None
        self._relays = Relays()

    def __enter__(self):
        for name in ("cni", "images"):
            (self._folder / name).mkdir(parents=True)
        for archive in self._images:
            os.link(archive, self._folder / "images" / archive.name)
        places = {"folder": self._folder, "root": self._root, "pause": PAUSE}
        (self._folder / "containerd.toml").write_text(_CONTAINERD.format(**places))
        (self._folder / "cni" / "bridge.conflist").write_text(_BRIDGE.format(address=ADDRESS))
        try:
            self._open()
            self._cluster.start("scheduler", *self._scheduler())
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if "scheduler" in self._cluster._running:
            self._cluster.kill("scheduler")
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()
            self._holder.stdin.close()
            self._holder.stdout.close()
        if self._first is not None:  # which ends after all others
            select.select([self._first], [], [])
            os.close(self._first)
            self._first = None
        self._relays.close()
        for controller in Path("/sys/fs/cgroup").iterdir():
            _remove_groups(controller / "k8s.io")
        self._cluster.request("DELETE", f"/api/v1/nodes/{NAME}")

    def expose(self, port):
        """Let pods reach a port of this machine's loopback; returns the URL that they reach it by."""
        self._relays.add(self._listen(ADDRESS, port), port)
        return f"http://{ADDRESS}:{port}"

    def _open(self):
        path = f"{self._root}/usr/bin:{self._root}/usr/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        flags = ["--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = _SCRIPT.format(address=ADDRESS)
        words = ["sh", "-c", script, "sh", self._root / "bin/busybox", self._folder, *self._kubelet()]
        with (self._folder / "node.log").open("wb") as log:
            self._holder = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", "unshare", *flags, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PATH": path},
                text=True,
            )
        self._expect("open")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self._inside = int(children.read_text().split()[0])
        self._first = os.pidfd_open(self._inside)
        self._relays.add(self._listen("127.0.0.1", self._cluster.port), self._cluster.port)
        self._holder.stdin.write("go\n")
        self._holder.stdin.flush()
        self._expect("serving")

    def _expect(self, word):
        line = self._holder.stdout.readline().strip()
        assert line == word, f"the node said {line!r}: {(self._folder / 'node.log').read_text()[-2000:]}"

    def _kubelet(self):
        return [
            built() / "bin/kubelet",
            f"--kubeconfig={self._cluster.kubeconfig()}",
            "--container-runtime=remote",
            "--container-runtime-endpoint=unix:///run/containerd.sock",
            f"--root-dir={self._folder / 'kubelet'}",
            f"--cert-dir={self._folder / 'kubelet-certificates'}",
            f"--volume-plugin-dir={self._folder / 'plugins'}",
            f"--hostname-override={NAME}",
            f"--node-ip={ADDRESS}",
            f"--address={ADDRESS}",
            "--cgroup-driver=cgroupfs",
            "--cgroups-per-qos=false",
            "--enforce-node-allocatable=",
            "--fail-swap-on=false",
            "--read-only-port=0",
            "--healthz-port=0",
            "--oom-score-adj=0",
            "--eviction-hard=",
            "--image-gc-high-threshold=100",
            "--max-pods=100",
            "--kube-api-qps=100",
            "--kube-api-burst=200",
            "--node-status-update-frequency=2s",
            "--sync-frequency=2s",
            "--resolv-conf=",
        ]

    def _scheduler(self):
        config = f"--kubeconfig={self._cluster.kubeconfig()}"
        port = f"--secure-port={free_port()}"
        return (
            built() / "bin/kube-scheduler",
            config,
            "--leader-elect=false",
            "--port=0",
            port,
            "--bind-address=127.0.0.1",
        )

    def _listen(self, host, port):
        """A listening socket in the node's network; one thread enters it and ends."""
        made = []

        def enter():
            with open(f"/proc/{self._inside}/ns/net") as space:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(space.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.create_server((host, port)))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        return made[0]

    def _wait_until_ready(self):
        until = time.monotonic() + _READY_S
        while True:
            answer = self._cluster.request("GET", f"/api/v1/nodes/{NAME}")
            conditions = answer.json()["status"].get("conditions", []) if answer.is_success else []
            if any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions):
                return
            assert self._holder.poll() is None, (self._folder / "kubelet.log").read_text()[-2000:]
            assert time.monotonic() < until, (self._folder / "kubelet.log").read_text()[-2000:]
            time.sleep(0.2)


class Relays:
    """Passes on what comes to listening sockets, in a thread with an event loop of its own."""

    def __init__(self):
        self._servers = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def add(self, listener, port):
        """From the socket to this port of the loopback."""
        serve = asyncio.start_server(lambda *ends: _relay(*ends, port), sock=listener)
        self._servers.append(asyncio.run_coroutine_threadsafe(serve, self._loop).result())

    def close(self):
        """Safe to repeat."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _stop(self):
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _relay(reader, writer, port):
    try:
        there = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.transport.abort()
        return
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_pass_on(reader, there[1]))
            group.create_task(_pass_on(there[0], writer))
    except (ExceptionGroup, asyncio.CancelledError):  # one side has cut the connection
        pass
    finally:
        writer.transport.abort()
        there[1].transport.abort()


async def _pass_on(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _remove_groups(folder):
    """Killed containers leave their empty groups behind; one that is in use is not ours, and stays."""
    for inside, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(inside)
