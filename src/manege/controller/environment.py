"""The environment of an agent: all of it, since nothing is inherited. Pure.

Model endpoints and a key in the variables that the SDKs of OpenAI, Anthropic and Google read, the task as a file, and
what the run's `agent.env` maps from the task.
"""

import json
import re
import ssl
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from manege.controller.folders import AttemptFolders
from manege.errors import HarnessError
from manege.sandbox.launcher import search_path
from manege.types import JsonObject, Rollout

__all__ = ["agent_environment", "fill", "fill_from", "system_environment"]

_FIELD = re.compile(r"\{(\w+)\}")


def agent_environment(
    rollout: Rollout,
    *,
    gateway_url: str,
    agent_key: str,
    folders: AttemptFolders,
    mapped: Mapping[str, str],
    services: Iterable[str] = (),
    given: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """`mapped`: the run's `agent.env`; it has the last word. `services`: their names. `given`: what a harness needs.
    Raises HarnessError for an unknown field in `mapped`."""
    spec = rollout.spec
    system = system_environment(home=str(folders.home), scratch=str(folders.scratch)) | dict(given or {})
    path = f"rollout/{quote(spec.id, safe='')}/attempt/{rollout.attempt}"
    events = f"{gateway_url}/api/{path.replace('rollout', 'rollouts', 1)}/events"
    mode = "train" if spec.is_train else "val"
    return {
        **system,
        **_quick_tls(gateway_url),
        "OPENAI_BASE_URL": f"{gateway_url}/v1",
        "OPENAI_API_KEY": agent_key,
        "ANTHROPIC_BASE_URL": gateway_url,
        "ANTHROPIC_API_KEY": agent_key,
        "ANTHROPIC_AUTH_TOKEN": agent_key,
        "GOOGLE_GEMINI_BASE_URL": gateway_url,
        "GEMINI_API_KEY": agent_key,
        "MANEGE_ROLLOUT_ID": spec.id,
        "MANEGE_TASK_FILE": str(folders.task_file),
        "MANEGE_EVENT_URL": events,
        "AGL_OPENAI_BASE_URL": f"{gateway_url}/proxy/{path}/mode/{mode}/openai/v1",
        "AGL_EVENT_URL": events,
        "AGL_KEY": agent_key,
        **{f"MANEGE_SERVICE_{name.upper()}": f"{gateway_url}/proxy/services/{name}" for name in services},
        **(given or {}),
        **{name: fill(text, spec.task.input, name=name, path=system["PATH"]) for name, text in mapped.items()},
    }


def system_environment(*, home: str, scratch: str) -> dict[str, str]:
    """What every program gets."""
    return {"PATH": search_path(), "HOME": home, "TMPDIR": scratch, "LANG": "C.UTF-8"}


def fill(template: str, fields: JsonObject, *, name: str, path: str | None = None) -> str:
    """A value of `agent.env`, from the task's input. `path`: what stands for `{PATH}`. Raises HarnessError."""
    fields = fields if path is None else {"PATH": path, **fields}
    return fill_from(template, fields, setting=f"agent.env.{name}", source="the task's input")


def fill_from(template: str, fields: JsonObject, *, setting: str, source: str) -> str:
    """Replace each `{field}`; text as it is, other values as JSON. Braces around anything but a name stay. Raises
    HarnessError that names the setting and the source of the fields."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise HarnessError(
                f"{setting} = {template!r}: {source} has no field {match[1]!r}; "
                f"it has {', '.join(sorted(fields)) or 'none'}"
            )
        return _text(fields[match[1]])

    return _FIELD.sub(value, template)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _quick_tls(gateway_url: str) -> dict[str, str]:
    """SDKs read a bundle of certificates for every client that they make, also for http: 30 ms per start. Named as a
    folder, the system's certificates are read when they are needed."""
    folder = ssl.get_default_verify_paths().capath
    return {"SSL_CERT_DIR": folder} if folder and gateway_url.startswith("http:") else {}
