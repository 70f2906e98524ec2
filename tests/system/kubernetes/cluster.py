"""A real Kubernetes control plane of the tests' own: etcd, kube-apiserver and kube-controller-manager on loopback.

The programs come from `.ci/kubernetes.sh`. They are killed with the process that started them; what they wrote lies in
one folder. Two users know the API from the start: the administrator, and one without any right.
"""

import json
import os
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

SCRIPT = Path(__file__).parents[3] / ".ci" / "kubernetes.sh"
ADMIN, RESTRICTED = "admin-token", "restricted-token"
_USERS = f'{ADMIN},admin,1,"system:masters"\n{RESTRICTED},restricted,2\n'
_CONTROLLERS = (
    "cronjob,garbagecollector,job,namespace,nodelifecycle,podgc,resourcequota,"
    "root-ca-cert-publisher,serviceaccount,serviceaccount-token,ttl-after-finished"
)
_READY_S = 60


def built():
    """The folder of the programs, whether or not they are there."""
    told = subprocess.run([SCRIPT, "--where"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(told.stdout.strip())


def missing(*programs):
    """The first of them that has not been built, or None."""
    return next((name for name in programs if not (built() / "bin" / name).exists()), None)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def spawn(command, log, **options):
    """Start a program that dies with the thread that called this."""
    with log.open("ab") as output:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            **options,
        )


class Cluster:
    """`with Cluster(folder) as cluster`: an empty one, of which nothing runs afterwards."""

    def __init__(self, folder, *, apiserver_options=(), manager_options=()):
        self.folder = folder
        self._programs = built()
        self._etcd_port, self._peer_port, self.port, self._manager_port = (free_port() for _ in range(4))
        self.url = f"https://127.0.0.1:{self.port}"
        self.ca_file = folder / "certificates" / "apiserver.crt"
        self._options = {"apiserver": apiserver_options, "manager": manager_options}
        self._running = {}
        # The kernel kills a program with the thread that started it, so this one stays, whoever asks for a start.
        self._starter = ThreadPoolExecutor(1)

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "users.csv").write_text(_USERS)
        key = ["openssl", "genrsa", "-out", self.folder / "accounts.key", "2048"]
        subprocess.run(key, check=True, stderr=subprocess.DEVNULL)
        try:
            self.start_etcd()
            self.start_apiserver()
            self.start_manager()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in list(self._running):
            self.kill(name)
        self._starter.shutdown()

    def start_etcd(self):
        here, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        self.start(
            "etcd",
            self._programs / "root/usr/bin/etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={here}",
            f"--advertise-client-urls={here}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )

    def start_apiserver(self):
        """Returns when requests are served; the data are those of before."""
        key = self.folder / "accounts.key"
        self.start(
            "apiserver",
            self._programs / "bin/kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--insecure-port=0",
            f"--cert-dir={self.ca_file.parent}",
            f"--token-auth-file={self.folder / 'users.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--feature-gates=TTLAfterFinished=true",
            "--allow-privileged=true",
            "--default-not-ready-toleration-seconds=1",
            "--default-unreachable-toleration-seconds=1",
            *self._options["apiserver"],
        )
        self._wait_until_ready()

    def start_manager(self):
        """Few seconds until a node that is silent counts as lost; quick enough for hundreds of Jobs."""
        self.start(
            "manager",
            self._programs / "bin/kube-controller-manager",
            f"--kubeconfig={self.kubeconfig()}",
            "--leader-elect=false",
            "--port=0",
            f"--secure-port={self._manager_port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.folder / 'manager-certificates'}",
            f"--root-ca-file={self.ca_file}",
            f"--service-account-private-key-file={self.folder / 'accounts.key'}",
            f"--controllers={_CONTROLLERS}",
            "--feature-gates=TTLAfterFinished=true",
            "--concurrent-gc-syncs=4",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=6s",
            "--node-startup-grace-period=60s",
            "--node-eviction-rate=100",
            *self._options["manager"],
        )

    def start(self, name, *command, **options):
        """A further program of the cluster; its output goes to NAME.log."""
        log = self.folder / f"{name}.log"
        self._running[name] = self._starter.submit(spawn, command, log, **options).result()

    def kill(self, name):
        """At once: asked kindly, an API server waits a minute for those who watch."""
        program = self._running.pop(name)
        program.kill()
        program.wait()

    def restart_apiserver(self, *, compact=False):
        """`compact`: the history before now is gone, so whoever watches on from an older version is told 410."""
        self.kill("apiserver")
        if compact:
            self.compact()
        self.start_apiserver()

    def compact(self):
        """Forget all versions but the present one."""
        with httpx.Client(base_url=f"http://127.0.0.1:{self._etcd_port}/v3/kv", trust_env=False) as etcd:
            present = etcd.post("/range", json={"key": "YQ=="}).raise_for_status().json()["header"]["revision"]
            etcd.post("/compaction", json={"revision": present, "physical": True}).raise_for_status()

    def kubeconfig(self, *, token=ADMIN, url=None, namespace="default", name="kubeconfig"):
        """The path of a new file with one context, named like the file."""
        return write_kubeconfig(self.folder / name, {name: self.context(token=token, url=url, namespace=namespace)})

    def context(self, *, token=ADMIN, url=None, namespace="default"):
        """An entry for `write_kubeconfig`."""
        return {"url": url or self.url, "ca_file": self.ca_file, "token": token, "namespace": namespace}

    def tls(self):
        """Trusts this API server alone."""
        return ssl.create_default_context(cafile=str(self.ca_file))

    def client(self, token=ADMIN):
        """A synchronous client of the API, to be closed."""
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, verify=self.tls(), trust_env=False, timeout=30)

    def request(self, method, path, body=None, *, token=ADMIN, kind="application/json"):
        """One request as a user: the answer, whatever its status. `kind`: of the body."""
        content = None if body is None else json.dumps(body)
        with self.client(token) as client:
            return client.request(method, path, content=content, headers={"Content-Type": kind})

    def account_token(self, namespace, name):
        """For an existing ServiceAccount."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return self.request("POST", path, wanted).raise_for_status().json()["status"]["token"]

    def _wait_until_ready(self):
        until = time.monotonic() + _READY_S
        log = self.folder / "apiserver.log"
        while True:
            # The certificate is made by the server itself: until it is there, there is nothing to trust.
            if self.ca_file.exists():
                try:
                    if self.request("GET", "/readyz").text == "ok":
                        return
                except (httpx.TransportError, ssl.SSLError):
                    pass
            for name in ("etcd", "apiserver"):
                ended = self._running[name].poll()
                assert ended is None, f"{name} ended with {ended}: {(self.folder / f'{name}.log').read_text()[-2000:]}"
            assert time.monotonic() < until, f"not ready after {_READY_S} s: {log.read_text()[-2000:]}"
            time.sleep(0.05)


def write_kubeconfig(path, contexts):
    """`contexts`: by name, as `Cluster.context` says them; the first is the current one."""
    clusters, users, pairs = [], [], []
    for name, entry in contexts.items():
        clusters.append({"name": name, "cluster": {"server": entry["url"]}})
        if entry["url"].startswith("https:"):
            clusters[-1]["cluster"]["certificate-authority"] = str(entry["ca_file"])
        users.append({"name": name, "user": {"token": entry["token"]}})
        pairs.append({"name": name, "context": {"cluster": name, "user": name, "namespace": entry["namespace"]}})
    config = {"apiVersion": "v1", "kind": "Config", "clusters": clusters, "users": users, "contexts": pairs}
    path.write_text(json.dumps({**config, "current-context": next(iter(contexts))}))
    path.chmod(0o600)
    return path


def required():
    """Whether a missing build is a failure rather than a reason to skip."""
    return os.environ.get("MANEGE_TEST_KUBERNETES") == "required"
