"""The section `kubernetes` of a run file: the Job of an attempt (docs/guides/kubernetes.md)."""

from manege.section import Section

__all__ = ["KubernetesConfig"]


class KubernetesConfig(Section):
    """How an attempt becomes a Job, for `manege controller --runner kubernetes`."""

    template: str | None = None
    """A Jinja template of a Job, relative to the run file; None: built from `image` and `agent.run`."""
    image: str | None = None
    """The agent's image."""
