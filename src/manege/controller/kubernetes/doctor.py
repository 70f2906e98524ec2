"""What a controller would meet in a namespace of a cluster, as findings, before a run depends on it.

Rights are asked of the API server one by one; quotas are compared with what an attempt of the run would need, where
they may be read. Then one Job is made as an attempt's would be, in the run's image, whose agent tries two connections:
to the gateway, which must work, and to the API server, which the run's NetworkPolicy forbids. The Job is removed again.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from manege.client import Claim
from manege.config import RunConfig
from manege.controller.kubernetes.api import Api, ApiError
from manege.controller.kubernetes.manifest import Manifest, build, owned
from manege.controller.kubernetes.names import Owner
from manege.controller.kubernetes.quota import refusals
from manege.controller.kubernetes.status import PodView, Seen, look
from manege.errors import ClusterError, HarnessError
from manege.types import JsonObject, Rollout, RolloutId, RolloutSpec, RolloutState, RunId, Task

__all__ = ["RIGHTS", "Finding", "examine"]

RIGHTS = {
    ("batch", "jobs"): ("create", "delete", "get", "list", "watch"),
    ("", "pods"): ("list", "watch"),
    ("", "secrets"): ("create",),
    ("networking.k8s.io", "networkpolicies"): ("create",),
}
"""All that a controller does: verbs by group and resource. The Role in deploy/ grants just these."""

_PROBE_S = 120.0
_LOOK_S = 0.5
_FORBIDDEN = 403

_NO_GATEWAY, _OTHERS, _NO_TOOL = 8, 16, 32
"""Bits of the probe's exit code, none of which a shell uses."""
_PROBE = f"""\
try() {{
  if command -v python3 > /dev/null; then
    python3 -c 'import socket, sys; socket.create_connection(sys.argv[1:], 5)' "$1" "$2"
  elif command -v bash > /dev/null; then
    timeout 5 bash -c 'exec 3<> "/dev/tcp/$0/$1"' "$1" "$2"
  elif command -v nc > /dev/null; then
    nc -w 5 "$1" "$2" < /dev/null
  elif command -v curl > /dev/null; then
    curl -s --connect-timeout 5 -m 10 "http://$1:$2" || case $? in 6|7|28) false ;; esac
  else
    exit {_NO_TOOL}
  fi > /dev/null 2>&1
}}
code=0
try "$1" "$2" || code={_NO_GATEWAY}
if try "$KUBERNETES_SERVICE_HOST" "$KUBERNETES_SERVICE_PORT"; then code=$((code + {_OTHERS})); fi
exit $code
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a report."""

    ok: bool | None
    """None: it cannot be told, or need not be."""
    text: str


async def examine(
    api: Api, namespace: str, *, config: RunConfig | None = None, gateway_url: str | None = None
) -> AsyncIterator[Finding]:
    """`config`: of the run whose attempts are meant; None: only rights are looked at. `gateway_url`: as the controller
    reaches it, for a run that does not say how pods do."""
    where = f"cluster {api.name}, namespace {namespace}"
    try:
        missing = [right async for right in _missing(api, namespace)]
        yield Finding(ok=True, text=f"{where}: the API server answers")
        for right in missing:
            yield Finding(ok=False, text=f"{where}: may not {right}; deploy/ has a Role that grants all it needs")
        if not missing:
            yield Finding(ok=True, text=f"{where}: all rights of a controller")
        if config is None:
            return
        url = config.kubernetes.gateway_url or gateway_url
        if url is None or config.kubernetes.image is None:
            yield Finding(ok=None, text="no probe: it needs kubernetes.image in the run, and the gateway's URL")
            return
        claim, probed = _claim(), _probing(config, url)
        manifest = build(claim, probed, owner=_owner(url), namespace=namespace, gateway_url=url.rstrip("/"))
        has_room = True
        async for finding in _quota(api, namespace, manifest):
            has_room &= finding.ok is not False
            yield finding
        if has_room and not missing:
            async for finding in _probe(api, namespace, manifest, url):
                yield finding
    except (ClusterError, HarnessError) as error:
        yield Finding(ok=False, text=f"{where}: {error}")


async def _missing(api: Api, namespace: str) -> AsyncIterator[str]:
    for (group, resource), verbs in RIGHTS.items():
        for verb in verbs:
            if not await api.allows(namespace, verb, group, resource):
                yield f"{verb} {resource}{group and '.'}{group}"


async def _quota(api: Api, namespace: str, manifest: Manifest) -> AsyncIterator[Finding]:
    try:
        quotas, _ = await api.list("ResourceQuota", namespace, "")
        ranges, _ = await api.list("LimitRange", namespace, "")
    except ApiError as error:
        if error.http_status != _FORBIDDEN:
            raise
        yield Finding(ok=None, text="quota: not looked at, since we may not list resourcequotas and limitranges")
        return
    refused = list(refusals(manifest.job["spec"]["template"]["spec"], quotas, ranges))
    for line in refused:
        yield Finding(ok=False, text=f"quota: {line}")
    if not refused:
        yield Finding(ok=True, text=f"quota: room for an attempt ({len(quotas)} quotas, {len(ranges)} limit ranges)")


async def _probe(api: Api, namespace: str, manifest: Manifest, url: str) -> AsyncIterator[Finding]:
    try:
        job = await _make(api, namespace, manifest)
        seen = await _end(api, namespace, manifest, job)
    finally:
        await api.delete("Job", namespace, manifest.name)
    if seen.agent is None or not seen.agent.message:
        why = seen.fault or seen.waiting or "no pod ran; `kubectl describe job` says more while a run waits"
        yield Finding(ok=False, text=f"probe: an attempt does not start: {why}")
        return
    code = json.loads(seen.agent.message)["exit_code"]
    if code & ~(_NO_GATEWAY | _OTHERS | _NO_TOOL):
        yield Finding(ok=False, text=f"probe: a pod runs, but a shell script in it ended with exit code {code}")
        return
    if code & _NO_TOOL:
        yield Finding(
            ok=None, text="probe: a pod runs, but its image has nothing that connects (python3, bash, nc, curl)"
        )
        return
    reached = not code & _NO_GATEWAY
    yield Finding(ok=reached, text=f"probe: a pod {'reaches' if reached else 'does not reach'} the gateway at {url}")
    if manifest.policy is None:
        yield Finding(ok=None, text="policy: kubernetes.network_policy is false, agents may connect to anything")
    elif code & _OTHERS:
        yield Finding(
            ok=False,
            text="policy: not enforced: a pod that may reach the gateway alone has reached the API server, too; this "
            "cluster has no engine of network policies (Cilium, Calico, ...)",
        )
    elif reached:
        yield Finding(ok=True, text="policy: a pod reaches the gateway and not the API server")


async def _make(api: Api, namespace: str, manifest: Manifest) -> JsonObject:
    if manifest.policy is not None:
        try:
            await api.create({
                **manifest.policy, "metadata": {**manifest.policy["metadata"], "namespace": namespace},
            })  # fmt: skip
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
    job = await api.create(manifest.job)
    await api.create(owned(manifest.secret, job))
    return job


async def _end(api: Api, namespace: str, manifest: Manifest, job: JsonObject) -> Seen:
    until_s = time.monotonic() + _PROBE_S
    while True:
        pods, _ = await api.list("Pod", namespace, f"job-name={manifest.name}")
        views = [PodView(pod=pod) for pod in pods]
        seen = look(job, views, bound=None, agent=manifest.agent, scorer=None)
        if seen.is_over or time.monotonic() > until_s:
            return seen
        await asyncio.sleep(_LOOK_S)


def _probing(config: RunConfig, url: str) -> RunConfig:
    """The run with the probe as its agent; image, limits, nodes and policy are its own."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    command = ["sh", "-c", _PROBE, "sh", parts.hostname or "", str(port)]
    limits = config.agent.limits.model_copy(update={"run_s": 60.0})
    agent = config.agent.model_copy(
        update={"run": command, "harness": None, "setup": None, "workspace": None, "env": {}, "limits": limits}
    )
    scorer = config.scorer.model_copy(update={"reward_from": "agent", "restore": [], "files": {}})
    kubernetes = config.kubernetes.model_copy(update={"template": None, "workspace": None})
    return config.model_copy(update={"agent": agent, "scorer": scorer, "kubernetes": kubernetes})


def _claim() -> Claim:
    name = f"doctor-{secrets.token_hex(4)}"
    task = Task(id="doctor", input={})
    spec = RolloutSpec(id=RolloutId(name), run=RunId("doctor"), task=task, reward_from="agent")
    rollout = Rollout(spec=spec, state=RolloutState.RUNNING, attempt=0, created_s=0)
    return Claim(rollout=rollout, agent_key=name, scorer_key=f"{name}-scorer")


def _owner(url: str) -> Owner:
    return Owner(gateway_url=url, controller="doctor")
