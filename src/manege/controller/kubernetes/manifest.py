"""From an attempt to its Job, its Secret and its NetworkPolicy. Pure.

Built from image and command: init containers `prepare` (the workspace out of the image), `setup`, `keep` (a copy for
the scorer) and `agent`, then `scorer` as the only main one; with `reward_from = "agent"` the agent is the main one.
From a template, the containers are the user's: the one named `agent`, else the first main one, is the agent, and one
named `scorer` the scorer. All get the agent's variables, but the scorer's container, which gets its own. Keys are only
in the Secret, which is made after the Job, whose pod waits for it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manege.client import Claim
from manege.config import RunConfig
from manege.controller.environment import agent_environment, fill, fill_from, system_environment
from manege.controller.folders import AttemptFolders, whole_task
from manege.controller.kubernetes.names import NETWORK, Owner, job_name, labels_of
from manege.controller.kubernetes.network import network_policy
from manege.controller.kubernetes.scripts import CHANNEL, MESSAGE, agent_script, prepare_script, scorer_script
from manege.controller.kubernetes.template import render
from manege.errors import HarnessError
from manege.sandbox.spec import Program
from manege.types import JsonObject, Rollout

__all__ = ["AGENT", "SCORER", "Manifest", "build", "check", "owned"]

AGENT, SCORER = "agent", "scorer"

_GRACE_S = 1
"""Between the signals with which a cancelled agent is stopped; with the API's own delays under 5 s."""
_LOST_NODE_S = 30
"""A node that is silent for so long, after Kubernetes has noticed, has lost its pods."""
_HERE = AttemptFolders(root=Path("/manege"), logs=Path("/manege"))
_TASK, _HIDDEN, _PRISTINE = "/manege/task", "/manege/hidden", "/manege/pristine"
_OF_THIS_MACHINE = frozenset({*system_environment(home="", scratch=""), "SSL_CERT_DIR"})
_VERDICT = "{verdict}"
_DROPPED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an attempt is in a cluster."""

    name: str
    """Of Job and Secret."""
    job: JsonObject
    secret: JsonObject
    policy: JsonObject | None
    agent: str | None
    """The agent's container; None: there is none, for a scorer's control."""
    scorer: str | None
    """The scorer's; None: nobody scores here."""
    has_memory_limit: bool
    """Whether the agent's container has one of its own: then running out of memory is its fault."""
    is_timed: bool
    """Whether our script ends the agent in time; else only the Job's deadline does."""


def check(config: RunConfig) -> None:
    """Raises HarnessError for a run whose attempts cannot be Jobs."""
    settings, agent, scorer = config.kubernetes, config.agent, config.scorer
    if scorer.network and settings.network_policy:
        raise HarnessError(
            "scorer.network = true: agent and scorer share a pod, and so its network; set "
            "kubernetes.network_policy = false to open it for both, or score without network"
        )
    if settings.template is not None:
        return
    if settings.image is None:
        raise HarnessError("the run says no image for its agents: set kubernetes.image or kubernetes.template")
    _command(agent.run, "agent.run")
    if agent.setup is not None:
        _command(agent.setup, "agent.setup")
    if scorer.reward_from == "scorer":
        _command(scorer.run, "scorer.run")
    if agent.workspace is not None:
        raise HarnessError(
            "agent.workspace names what lies on this machine; in a pod the workspace is a folder of the image: set "
            "kubernetes.workspace instead"
        )


def build(
    claim: Claim, config: RunConfig, *, owner: Owner, namespace: str, gateway_url: str, control: str | None = None
) -> Manifest:
    """`control`: a Job of this name without the agent, to see whether the scorer works on a workspace that no agent has
    touched. Raises HarnessError."""
    name = job_name(claim, part=control or "")
    rollout, settings = claim.rollout, config.kubernetes
    agent_env = _agent_variables(claim, config, gateway_url)
    scorer = SCORER if rollout.spec.reward_from == "scorer" else None
    if settings.template is None:
        job = _built(claim, config, control=control is not None)
    else:
        visible = {key: value for key, value in agent_env.items() if value != claim.agent_key}
        job = deepcopy(dict(render(
            settings.template, input=rollout.spec.task.input, rollout=_shown(rollout), env=visible, job_name=name
        )))  # fmt: skip
    pod = _pod(job)
    if control is not None:
        pod["initContainers"] = [entry for entry in pod.get("initContainers") or [] if entry["name"] != AGENT]
    agent = None if control is not None else _agent_container(pod)
    if scorer is not None and scorer not in {container["name"] for container in pod["containers"]}:
        raise HarnessError(
            'kubernetes.template has no container named "scorer": add one, whose last message is the verdict, or set '
            'scorer.reward_from = "agent"'
        )
    if scorer is not None and agent in {container["name"] for container in pod["containers"]}:
        raise HarnessError(
            f"kubernetes.template runs the agent ({agent}) beside its scorer: make it an init container, so that it is "
            "over when the scorer begins"
        )
    policy = network_policy(settings, gateway_url) if settings.network_policy else None
    labels = labels_of(claim, owner)
    if policy is not None:
        labels |= policy["spec"]["podSelector"]["matchLabels"]
    _harden(job, pod, config)
    _name(job, name=name, namespace=namespace, labels=labels, rollout=rollout)
    for container in _containers(pod):
        is_hidden = container["name"] == SCORER or (settings.template is None and container["name"] == "setup")
        if is_hidden:
            _equip(container, pod, name, _scorer_variables(claim, agent_env, config), "hidden", _HIDDEN, claim)
        else:
            _equip(container, pod, name, agent_env, "task", _TASK, claim)
    return Manifest(
        name=name,
        job=job,
        secret=_secret(claim, config, name=name, namespace=namespace, labels=labels),
        policy=policy,
        agent=agent,
        scorer=scorer,
        has_memory_limit=agent is not None and _has_memory_limit(pod, agent),
        is_timed=settings.template is None,
    )


def owned(secret: JsonObject, job: JsonObject) -> JsonObject:
    """The Secret as one that goes with the Job."""
    meta = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    return {**secret, "metadata": {**secret["metadata"], "ownerReferences": [owner]}}


def _built(claim: Claim, config: RunConfig, *, control: bool) -> dict[str, Any]:
    """The containers of a run that has no template."""
    check(config)
    settings, agent, limits = config.kubernetes, config.agent, config.agent.limits
    is_scored = claim.rollout.spec.reward_from == "scorer"
    workspace = settings.workspace or "/workspace"
    pristine = _PRISTINE if is_scored and config.scorer.restore else None
    image = {"image": _image(settings.image, "image", claim)}
    elsewhere = [{"name": "workspace", "mountPath": str(_HERE.workspace)}]
    kept = [*elsewhere, {"name": "pristine", "mountPath": _PRISTINE}] if pristine else elsewhere
    before: list[dict[str, Any]] = []

    def prepare(name: str, *, source: str | None, pristine: str | None) -> None:
        script = prepare_script(str(_HERE.workspace), source=source, pristine=pristine)
        before.append({"name": name, **image, "command": ["sh", "-c", script], "volumeMounts": list(kept)})

    in_place = [{"name": "workspace", "mountPath": workspace}]
    if settings.workspace or (pristine and agent.setup is None):
        prepare("prepare", source=settings.workspace, pristine=None if agent.setup else pristine)
    if agent.setup is not None:
        command = _command(agent.setup, "agent.setup")
        before.append({
            "name": "setup", **image, "command": _literal(command), "workingDir": workspace,
            "volumeMounts": [*in_place, *kept[1:]],
        })  # fmt: skip
        prepare("keep", source=None, pristine=pristine)
    command = _literal(_command(agent.run, "agent.run"))
    if not control:
        before.append({
            "name": AGENT, **image, "command": ["sh", "-c", agent_script(limits.run_s), "sh", *command],
            "workingDir": workspace, "volumeMounts": list(in_place), "resources": _resources(config),
            "securityContext": dict(_DROPPED),
        })  # fmt: skip
    main = [_scorer(claim, config, workspace, pristine)] if is_scored else [before.pop()]
    volumes = [{"name": "workspace", "emptyDir": {}}, *([{"name": "pristine", "emptyDir": {}}] if pristine else [])]
    spec: dict[str, Any] = {
        "initContainers": before,
        "containers": main,
        "volumes": volumes,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
    }
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    if settings.runtime_class is not None:
        spec["runtimeClassName"] = settings.runtime_class
    return {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": {"spec": spec}}}


def _image(template: str | None, name: str, claim: Claim) -> str | None:
    """`name`: of the setting."""
    fields = claim.rollout.spec.task.input
    return template and fill_from(template, fields, setting=f"kubernetes.{name}", source="the task's input")


def _scorer(claim: Claim, config: RunConfig, workspace: str, pristine: str | None) -> dict[str, Any]:
    settings, scorer = config.kubernetes, config.scorer
    words = _command(scorer.run, "scorer.run")
    script = scorer_script(
        workspace,
        score_s=config.agent.limits.score_s,
        restore=scorer.restore,
        pristine=pristine,
        files={path: f"{_HIDDEN}/file-{number}" for number, path in enumerate(scorer.files)},
        stdin=f"{_HIDDEN}/input.json",
        has_channel=any(_VERDICT in word for word in words),
    )
    mounts = [{"name": "workspace", "mountPath": workspace}]
    if pristine is not None:
        mounts.append({"name": "pristine", "mountPath": pristine, "readOnly": True})  # type: ignore[dict-item]
    command = ["sh", "-c", script, "sh", *_literal(word.replace(_VERDICT, str(CHANNEL)) for word in words)]
    image = _image(settings.scorer_image, "scorer_image", claim) or _image(settings.image, "image", claim)
    return {"name": SCORER, "image": image, "command": command, "volumeMounts": mounts, "resources": _resources(config)}


def _resources(config: RunConfig) -> dict[str, Any]:
    settings, limits = config.kubernetes, config.agent.limits
    cpu = {} if limits.cpus is None else {"cpu": f"{math.ceil(limits.cpus * 1000)}m"}
    bounds = {"memory": f"{limits.memory_mb}Mi", **cpu, **settings.limits}
    return {"limits": bounds, **({"requests": dict(settings.requests)} if settings.requests else {})}


def _harden(job: dict[str, Any], pod: dict[str, Any], config: RunConfig) -> None:
    """What holds for every Job, whatever a template says: one pod, once; an end; no key of the cluster inside."""
    limits, settings = config.agent.limits, config.kubernetes
    whole_s = settings.pending_s + limits.setup_s + limits.run_s + limits.score_s + limits.cleanup_s
    spec = job["spec"]
    spec |= {"backoffLimit": 0, "parallelism": 1, "completions": 1, "ttlSecondsAfterFinished": int(settings.keep_s)}
    spec.setdefault("activeDeadlineSeconds", math.ceil(whole_s))
    pod |= {"restartPolicy": "Never"}
    pod["terminationGracePeriodSeconds"] = min(_GRACE_S, pod.get("terminationGracePeriodSeconds", _GRACE_S))
    pod.setdefault("automountServiceAccountToken", False)
    pod.setdefault("enableServiceLinks", False)
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_NODE_S}
    tolerations = pod.setdefault("tolerations", [])
    tolerations += [{"key": f"node.kubernetes.io/{why}", **lost} for why in ("not-ready", "unreachable")]


def _name(job: dict[str, Any], *, name: str, namespace: str, labels: Mapping[str, str], rollout: Rollout) -> None:
    spec = rollout.spec
    annotations = {
        "manege/rollout-id": spec.id,
        "manege/run": spec.run,
        "manege/task": spec.task.id,
        **({"manege/group": spec.group} if spec.group is not None else {}),
    }
    for meta in (job.setdefault("metadata", {}), job["spec"]["template"].setdefault("metadata", {})):
        meta["labels"] = {**(meta.get("labels") or {}), **labels}
        meta["annotations"] = {**(meta.get("annotations") or {}), **annotations}
    job["metadata"] |= {"name": name, "namespace": namespace}


def _equip(
    container: dict[str, Any],
    pod: dict[str, Any],
    secret: str,
    variables: Mapping[str, str],
    volume: str,
    path: str,
    claim: Claim,
) -> None:
    """Give a container its variables, which replace those of the same names, and its files."""
    keys = {claim.agent_key: "agent-key", claim.scorer_key: "scorer-key"}
    env = [entry for entry in container.get("env") or [] if entry.get("name") not in variables]
    for name, value in variables.items():
        if value in keys:
            source = {"secretKeyRef": {"name": secret, "key": keys[value]}}
            env.append({"name": name, "valueFrom": source})
        else:
            env.append({"name": name, "value": _escaped(value)})
    container["env"] = env
    container["terminationMessagePath"] = MESSAGE
    mount = {"name": f"manege-{volume}", "mountPath": path, "readOnly": True}
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
    volumes = pod.setdefault("volumes", [])
    if all(entry["name"] != mount["name"] for entry in volumes):
        items = {"items": [{"key": "task.json", "path": "task.json"}]} if volume == "task" else {}
        volumes.append({"name": mount["name"], "secret": {"secretName": secret, **items}})


def _agent_variables(claim: Claim, config: RunConfig, gateway_url: str) -> dict[str, str]:
    """Those of local agents, less what is about this machine."""
    env = agent_environment(
        claim.rollout,
        gateway_url=gateway_url,
        agent_key=claim.agent_key,
        folders=_HERE,
        mapped={},
        services=config.services,
    )
    own = {name: value for name, value in env.items() if name not in _OF_THIS_MACHINE}
    task = claim.rollout.spec.task.input
    mapped = {name: fill(template, task, name=name) for name, template in config.agent.env.items()}
    return {**own, "MANEGE_TASK_FILE": f"{_TASK}/task.json", **mapped}


def _scorer_variables(claim: Claim, agent_env: Mapping[str, str], config: RunConfig) -> dict[str, str]:
    return {
        "MANEGE_ROLLOUT_ID": claim.rollout.spec.id,
        "MANEGE_TASK_FILE": f"{_HIDDEN}/hidden.json",
        "MANEGE_WORKSPACE": config.kubernetes.workspace or "/workspace",
        "MANEGE_EVENT_URL": agent_env["MANEGE_EVENT_URL"],
        "MANEGE_SCORER_KEY": claim.scorer_key,
    }


def _secret(claim: Claim, config: RunConfig, *, name: str, namespace: str, labels: Mapping[str, str]) -> dict[str, Any]:
    task = claim.rollout.spec.task
    workspace = config.kubernetes.workspace or "/workspace"
    told = {"workspace": workspace, "stdout": "", "stderr": "", "exit_code": None, "timed_out": False, "calls": []}
    fields = {**task.input, **task.hidden}
    files = {
        f"file-{number}": fill_from(text, fields, setting=f"scorer.files.{path}", source="the task")
        for number, (path, text) in enumerate(config.scorer.files.items())
    }
    data = {
        "agent-key": claim.agent_key,
        "scorer-key": claim.scorer_key,
        "task.json": json.dumps({"id": task.id, "input": task.input}),
        "hidden.json": whole_task(task),
        "input.json": json.dumps({"task": json.loads(whole_task(task)), "attempt": told}),
        **files,
    }
    meta = {"name": name, "namespace": namespace, "labels": {k: v for k, v in labels.items() if k != NETWORK}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": data, "immutable": True}


def _shown(rollout: Rollout) -> JsonObject:
    """What a template may know of a rollout: nothing hidden."""
    spec = rollout.spec
    return {
        "rollout_id": spec.id, "id": spec.id, "attempt": rollout.attempt, "run": spec.run, "group": spec.group,
        "task": spec.task.id, "input": spec.task.input, "is_train": spec.is_train, "metadata": spec.metadata,
    }  # fmt: skip


def _pod(job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        pod = job["spec"]["template"]["spec"]
        names = [container["name"] for container in _containers(pod)]
    except (KeyError, TypeError, AttributeError) as error:
        raise HarnessError(
            f"kubernetes.template gives a Job without spec.template.spec.containers: {error!r}"
        ) from error
    if not names:
        raise HarnessError("kubernetes.template gives a Job without containers")
    return pod


def _containers(pod: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from pod.get("initContainers") or []
    yield from pod.get("containers") or []


def _agent_container(pod: Mapping[str, Any]) -> str:
    if any(container["name"] == AGENT for container in _containers(pod)):
        return AGENT
    return _first(container["name"] for container in pod["containers"] if container["name"] != SCORER)


def _first(names: Iterable[str]) -> str:
    name = next(iter(names), None)
    if name is None:
        raise HarnessError('kubernetes.template has no container for the agent: name one "agent"')
    return name


def _has_memory_limit(pod: Mapping[str, Any], name: str) -> bool:
    limits = [(entry.get("resources") or {}).get("limits") or {} for entry in _containers(pod) if entry["name"] == name]
    return "memory" in limits[0]


def _command(program: Program | None, setting: str) -> list[str]:
    if isinstance(program, list):
        return program
    what = "a harness" if program is None else f"{program!r}"
    raise HarnessError(
        f"{setting} is {what}, which is on this machine and not in the image; in a pod it must be a command: a list of "
        "arguments"
    )


def _literal(command: Iterable[str]) -> list[str]:
    return [_escaped(word) for word in command]


def _escaped(text: str) -> str:
    """Kubernetes replaces $(NAME)."""
    return text.replace("$(", "$$(")
