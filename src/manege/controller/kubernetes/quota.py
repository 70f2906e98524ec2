"""Whether a namespace's quotas and limit ranges let an attempt's pod in. Pure.

In: the pod as it would be made, and the namespace's ResourceQuotas and LimitRanges. Out: one line for each that would
refuse it. Quotas with scopes count only some pods, and are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from lightkube.utils.quantity import parse_quantity

from manege.types import JsonObject

__all__ = ["refusals"]

_COUNTED = ("pods", "count/pods", "count/jobs.batch", "count/secrets", "secrets")
"""An attempt makes one of each."""


def refusals(pod: JsonObject, quotas: Sequence[JsonObject], limit_ranges: Sequence[JsonObject]) -> Iterator[str]:
    """`pod`: its `spec`."""
    rules = [rule for each in limit_ranges for rule in each["spec"]["limits"] if rule["type"] == "Container"]
    containers = [_with_defaults(container, rules) for kind in _KINDS for container in pod.get(kind) or []]
    for rule in rules:
        yield from _outside(rule, containers)
    needed = _needed(pod, rules)
    for quota in quotas:
        spec, status = quota["spec"], quota.get("status") or {}
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue
        for resource, hard in (spec.get("hard") or {}).items():
            used, need = _number((status.get("used") or {}).get(resource, "0")), needed.get(resource)
            name = f"ResourceQuota {quota['metadata']['name']}"
            if need is not None and used + need > _number(hard):
                amounts = f"{used.normalize():f} of {hard}, an attempt needs {need.normalize():f}"
                yield f"{name}: {resource} is used up ({amounts})"
            elif need is None and resource.removeprefix("requests.").removeprefix("limits.") in _COMPUTE:
                yield f"{name}: every pod must say its {resource}: set kubernetes.limits or kubernetes.requests"


_KINDS = ("initContainers", "containers")
_COMPUTE = ("cpu", "memory")


def _with_defaults(container: JsonObject, rules: Sequence[JsonObject]) -> Mapping[str, Mapping[str, str]]:
    """The container's limits and requests as they are once it is admitted."""
    resources = container.get("resources") or {}
    limits, requests = dict(resources.get("limits") or {}), dict(resources.get("requests") or {})
    for rule in rules:
        limits = {**(rule.get("default") or {}), **limits}
    requests = {**limits, **requests} if resources.get("limits") else requests
    for rule in rules:
        requests = {**(rule.get("defaultRequest") or {}), **requests}
    return {"limits": limits, "requests": {**limits, **requests}}


def _outside(rule: JsonObject, containers: Sequence[Mapping[str, Mapping[str, str]]]) -> Iterator[str]:
    for bound, kind in (("max", "limits"), ("min", "requests")):
        for resource, value in (rule.get(bound) or {}).items():
            given = [each[kind].get(resource) for each in containers]
            if any(text is not None and _is_past(bound, _number(text), _number(value)) for text in given):
                yield f"LimitRange: {bound} of {kind}.{resource} is {value} for a container"


def _is_past(bound: str, given: Decimal, value: Decimal) -> bool:
    return given > value if bound == "max" else given < value


def _needed(pod: JsonObject, rules: Sequence[JsonObject]) -> dict[str, Decimal]:
    """By the resource's name in a quota: init containers run one by one, before the others, which run together."""
    needed: dict[str, Decimal] = {name: Decimal(1) for name in _COUNTED}
    for kind in ("limits", "requests"):
        apart, together = ([_with_defaults(each, rules)[kind] for each in pod.get(field) or []] for field in _KINDS)
        for resource in {name for each in (*apart, *together) for name in each}:
            if any(resource not in each for each in (*apart, *together)):
                continue
            before = max((_number(each[resource]) for each in apart), default=Decimal(0))
            needed[f"{kind}.{resource}"] = max(before, sum((_number(each[resource]) for each in together), Decimal(0)))
    return needed | {name: needed[f"requests.{name}"] for name in _COMPUTE if f"requests.{name}" in needed}


def _number(quantity: Any) -> Decimal:
    return parse_quantity(str(quantity)) or Decimal(0)
