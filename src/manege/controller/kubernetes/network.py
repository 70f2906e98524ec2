"""The NetworkPolicy of a run's pods: nothing comes in, and out goes only what is for the gateway. Pure.

Its name and the label that it selects derive from what it allows: runs that allow the same share one, it never changes,
and making it again does no harm.
"""

import hashlib
import ipaddress
import json
from typing import Any
from urllib.parse import urlsplit

from manege.controller.kubernetes.names import NETWORK
from manege.errors import HarnessError
from manege.kubernetes_config import KubernetesConfig
from manege.types import JsonObject

__all__ = ["network_policy"]

_DNS = {
    "to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
    "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")],
}


def network_policy(config: KubernetesConfig, gateway_url: str) -> JsonObject:
    """Raises HarnessError where the gateway cannot be told from other addresses."""
    parts = urlsplit(gateway_url)
    egress: list[Any] = []
    try:
        address = ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        if not (config.gateway_pods and config.dns):
            raise HarnessError(
                f"kubernetes.gateway_url = {gateway_url!r} is a name: set kubernetes.dns = true and "
                "kubernetes.gateway_pods to the labels of the gateway's pods, or give its address"
            ) from None
    else:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        block = {"cidr": f"{address}/{address.max_prefixlen}"}
        egress.append({"to": [{"ipBlock": block}], "ports": [{"protocol": "TCP", "port": port}]})
    if config.gateway_pods:
        # Without ports: those of the pods may differ from the service's.
        egress.append({"to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": config.gateway_pods}}]})
    if config.dns:
        egress.append(_DNS)
    digest = hashlib.sha256(json.dumps(egress, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"manege-{digest}", "labels": {"app.kubernetes.io/managed-by": "manege"}},
        "spec": {
            "podSelector": {"matchLabels": {NETWORK: digest}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": egress,
        },
    }
