"""From a Jinja template to a Job, as Agent Lightning's templates are written. Pure.

A template sees `input` (the task's), `rollout` (id, attempt, run, task, is_train, metadata), `env` (the agent's
variables, keys left out) and `job_name`; the filter `yaml_escape` quotes a value for YAML. Tasks are data and may come
from anywhere, so rendering is sandboxed.
"""

import json
from typing import Any

import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from manege.errors import HarnessError
from manege.types import JsonObject

__all__ = ["render"]


def render(template: str, **variables: Any) -> JsonObject:
    """One Job as JSON. Raises HarnessError for a template that does not give exactly one."""
    jinja = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    jinja.filters["yaml_escape"] = lambda value: json.dumps(str(value))
    try:
        text = jinja.from_string(template).render(**variables)
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except (TemplateError, yaml.YAMLError, TypeError, ValueError) as error:
        raise HarnessError(f"kubernetes.template cannot be rendered: {error}") from error
    kinds = [document.get("kind") if isinstance(document, dict) else type(document).__name__ for document in documents]
    if kinds != ["Job"]:
        raise HarnessError(f"kubernetes.template gives {kinds or 'nothing'}, want exactly one document of kind Job")
    return documents[0]
