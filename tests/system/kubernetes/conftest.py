"""A real Kubernetes API for the tests of this folder; started once, and a namespace of its own for each test."""

import os
import subprocess
import uuid

import pytest

from tests.system.kubernetes.api import Api
from tests.system.kubernetes.cluster import SCRIPT, Cluster, missing, required
from tests.system.kubernetes.containers import bubblewrap
from tests.system.kubernetes.faults import FaultyProxy
from tests.system.kubernetes.kubelet import Kubelet


def needs(*programs):
    """Skip, or fail where Kubernetes is required, unless the programs have been built."""
    if (name := missing(*programs)) is None:
        return
    _leave_out(f"{name} has not been built: run {os.path.relpath(SCRIPT)} (ten minutes, once)")


def _leave_out(reason):
    if required():
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Its control plane; pods stay pending unless there is a kubelet."""
    needs("kube-apiserver", "kube-controller-manager")
    with Cluster(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


@pytest.fixture
def namespace(cluster):
    """The name of an empty one."""
    name = f"t-{uuid.uuid4().hex[:10]}"
    cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}}).raise_for_status()
    yield name
    cluster.request("DELETE", f"/api/v1/namespaces/{name}").raise_for_status()


@pytest.fixture
async def kube(cluster):
    """Its API as the administrator asks it."""
    async with Api(cluster) as opened:
        yield opened


@pytest.fixture
async def kubelet(cluster, namespace, tmp_path):
    """A node that runs the containers of the test's namespace as processes of this machine."""
    tried = subprocess.run([bubblewrap(), "--unshare-pid", "--ro-bind", "/", "/", "true"], stderr=subprocess.PIPE)
    if tried.returncode != 0:
        _leave_out(f"containers cannot be made here: {tried.stderr.decode().strip()}")
    async with Kubelet(cluster, namespaces={namespace}, folder=tmp_path / "node") as running:
        yield running


@pytest.fixture
async def proxy(cluster):
    """In front of the API server: does to requests what a test wants."""
    async with FaultyProxy(cluster) as running:
        yield running
