"""The section `kubernetes` of a run file: the Job of an attempt (docs/guides/kubernetes.md)."""

from typing import Annotated

from pydantic import Field

from manege.section import PositiveFloat, Section

__all__ = ["KubernetesConfig"]

AbsolutePath = Annotated[str, Field(pattern=r"^/[^/].*$")]


class KubernetesConfig(Section):
    """How an attempt becomes a Job, for `manege controller --runner kubernetes`."""

    template: str | None = None
    """A Jinja template of a Job, with `input`, `rollout`, `env` and `job_name`: a file beside the run file, or its
    text; None: built from `image` and `agent.run`."""
    image: str | None = None
    """The agent's image; `{field}` is replaced by that field of the task's input, in `scorer_image`, too."""
    scorer_image: str | None = None
    """The scorer's; None: the agent's."""
    namespace: str | None = None
    """One of those that the controller serves; None: its first one."""
    gateway_url: str | None = None
    """The gateway as pods reach it; None: as the controller does."""
    gateway_pods: dict[str, str] = Field(default_factory=dict)
    """Labels of the gateway's pods, to which alone the agents may connect; needed where the gateway's URL has a name
    and not an address."""
    dns: bool = False
    """Let agents ask the cluster's DNS, which can carry data out."""
    network_policy: bool = True
    """Let agents connect to nothing but the gateway, where the cluster enforces such policies."""
    workspace: AbsolutePath | None = None
    """The folder of the agent's image that the agent works on, at this path; None: /workspace, empty."""
    requests: dict[str, str] = Field(default_factory=dict)
    """Of the agent's container, by resource; what is not named is requested as it is limited."""
    limits: dict[str, str] = Field(default_factory=dict)
    """Beside `memory` and `cpu`, which follow from `agent.limits`."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that may run attempts."""
    runtime_class: str | None = None
    """A stronger isolation than the cluster's default, such as `gvisor`."""
    pending_s: PositiveFloat = 600
    """For finding a node and pulling images; then the attempt is an infrastructure failure."""
    keep_s: PositiveFloat = 3600
    """Ended Jobs stay so long, to be looked at, and for a controller that was away."""
