"""How an agent is started: the program of a run file as it is, a known harness from its data.

In: the run's agent section, a task, an attempt's folders. Out: program, environment and what more it may read; the
configuration files of a harness are written into the attempt's private home.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from manege.config import AgentConfig
from manege.controller.environment import fill_from
from manege.controller.folders import AttemptFolders
from manege.errors import HarnessError
from manege.harnesses.harness import Harness, load
from manege.harnesses.install import Installed, find, root_folder
from manege.sandbox.launcher import search_path
from manege.sandbox.spec import Program
from manege.types import JsonObject

__all__ = ["Launch", "find_program", "harness_launch", "program_launch", "task_text"]

_MODEL = "manege"
"""The gateway serves its model under any name; this is none that a harness knows, so that it assumes nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start."""

    program: Program
    env: Mapping[str, str]
    """Beside what every agent gets."""
    readable: Sequence[str] = ()
    """Beside system, interpreter and workspace."""
    javascript: bool = False
    """See `Harness.javascript`."""
    terminals: bool = False
    """See `Policy`, as for `folders`."""
    folders: Mapping[str, str] = field(default_factory=dict)


def find_program(agent: AgentConfig) -> Program:
    """What will be started, as far as it is known before the first attempt. Raises HarnessError for a harness that is
    not known or not installed."""
    if agent.harness is None:
        return program_launch(agent).program
    harness = load(agent.harness)
    return [find(harness, root_folder()).program(harness.command[0])]


def program_launch(agent: AgentConfig) -> Launch:
    """A program of the run's own."""
    assert agent.run is not None  # the config has either run or harness
    return Launch(program=agent.run, env={})


def harness_launch(
    name: str, *, task: str, gateway_url: str, agent_key: str, context_limit: int, folders: AttemptFolders
) -> Launch:
    """Writes the harness's files. `context_limit`: tokens of prompt + answer. Raises HarnessError."""
    harness = load(name)
    installed = find(harness, root_folder())
    fields = {
        "task": task,
        "gateway": gateway_url,
        "key": agent_key,
        "model": _MODEL,
        "context_limit": context_limit,
        "home": str(folders.home),
        "workspace": str(folders.workspace),
        "here": str(files("manege.harnesses")),
    }
    for path, text in harness.files.items():
        target = folders.home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_fill(harness, text, fields), encoding="utf-8")
    first, *arguments = harness.command
    places = {}
    for number, place in enumerate(harness.folders):
        own = folders.root / f"folder{number}"
        own.mkdir(mode=0o700)
        places[_fill(harness, place, {"uid": os.getuid()})] = str(own)
    return Launch(
        program=[installed.program(first), *(_fill(harness, argument, fields) for argument in arguments)],
        env=_path(installed) | {key: _fill(harness, value, fields) for key, value in harness.env.items()},
        readable=installed.readable,
        javascript=harness.javascript,
        terminals=harness.terminals,
        folders=places,
    )


def task_text(agent: AgentConfig, task: JsonObject) -> str:
    """What a harness is told; `task`: the task's input. Raises HarnessError."""
    if agent.task is not None:
        return fill_from(agent.task, task, setting="agent.task", source="the task's input")
    found = [task[field] for field in ("task", "prompt") if isinstance(task.get(field), str)]
    if not found:
        raise HarnessError(
            f"the task's input has neither `task` nor `prompt` to tell the harness; it has "
            f'{", ".join(task) or "nothing"}. Set agent.task, for example to "{{question}}"'
        )
    return found[0]


def _path(installed: Installed) -> dict[str, str]:
    return {"PATH": os.pathsep.join([*installed.programs, search_path()])}


def _fill(harness: Harness, template: str, fields: JsonObject) -> str:
    return fill_from(template, fields, setting=f"harness {harness.name}", source="its launch")
