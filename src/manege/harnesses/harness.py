"""A harness as data: `<name>.toml` in this folder. To add one, add its file (docs/guides/harnesses.md).

In: a name. Out: a frozen Harness. `{task}`, `{gateway}`, `{key}` ... in `command`, `env` and `files` are replaced when
it is started (`controller.harness`); nothing here starts, installs or reads anything else.
"""

import difflib
import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from manege.errors import HarnessError

__all__ = ["Filter", "Harness", "Install", "ThreadRule", "load", "names", "parse"]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression, searched for."""
LowerCase = Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
"""The name of a header."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Install(_Table):
    """Where it comes from; versions are pinned."""

    npm: tuple[str, ...] = ()
    """`name@version`."""
    pypi: tuple[str, ...] = ()
    """`name==version`, into a virtual environment of its own."""
    node: str | None = None
    """Version of Node, itself a package of npm."""
    python: str = "3.11"
    """The oldest Python that will do."""


class ThreadRule(_Table):
    """Which calls belong to another thread than the main one: those for which all that is named here holds."""

    thread: str
    """`agent:<id>` or `side:<kind>`; `{header-name}` is replaced by that header."""
    headers: dict[LowerCase, Pattern] = Field(default_factory=dict)
    system: Pattern | None = None
    """In the text of the system and developer messages."""
    user: Pattern | None = None
    """In the text of the last user message."""
    tools: bool | None = None
    """Whether tools are offered."""
    structured: bool | None = None
    """Whether the answer must match a JSON schema."""


class Filter(_Table):
    """Text that differs from call to call though nothing has happened, so that no prompt continues another."""

    name: str
    """For the record of what was edited."""
    pattern: Pattern
    replacement: str = ""
    """May refer to groups of the pattern."""
    in_user: bool = False
    """Looked for in user messages, too."""
    optional: bool = False
    """Differs only from rollout to rollout (dates, session ids): taken out with `agent.common_prompts`."""


class Harness(_Table):
    """One harness."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    """The name of its file."""
    title: str
    home_page: str
    version: str
    """Of the pinned release; what `user_agent` and the rules below were observed with."""
    protocol: Literal["chat", "responses", "anthropic"]
    """What it speaks, started as below."""
    streams: bool
    command: tuple[str, ...]
    """The first word is looked up in its own installation; `{here}` is this folder."""
    env: dict[str, str] = Field(default_factory=dict)
    """Beside the variables that every agent gets."""
    files: dict[str, str] = Field(default_factory=dict)
    """Written before it starts, by their path in the rollout's private home."""
    install: Install
    javascript: bool = False
    """Its engine reserves far more address space than it uses, so only what it uses can be limited."""
    terminals: bool = False
    """It runs commands in pseudo-terminals."""
    folders: tuple[str, ...] = ()
    """Folders that it writes to at a fixed place; each rollout finds an empty one of its own there. `{uid}`: the user's
    number."""
    headers: dict[LowerCase, Pattern] = Field(default_factory=dict)
    """What its calls are recognised by when it was started by hand; empty: by nothing that others do not send."""
    threads: tuple[ThreadRule, ...] = ()
    """The first that holds names the thread; without one it is `main`."""
    filters: tuple[Filter, ...] = ()
    """Applied to the system messages."""
    function: str | None = None
    """A filter that a pattern cannot express: `module:function` of this package,
    f(ModelRequest) -> (ModelRequest, lines for the record)."""
    samples: str = "one for the main thread"
    """How many samples a rollout gives, and why if the main thread gives more than one."""


@cache
def names() -> tuple[str, ...]:
    """Of all harnesses, in order."""
    found = (entry.name for entry in files("manege.harnesses").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


@cache
def load(name: str) -> Harness:
    """Raises HarnessError for a name that is not known."""
    if name not in names():
        nearest = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(names())}"
        raise HarnessError(f"there is no harness {name!r}; {hint}")
    return parse(name, files("manege.harnesses").joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def parse(name: str, text: str) -> Harness:
    """Raises HarnessError that names each wrong key and the nearest right one."""
    try:
        return Harness.model_validate({"name": name, **tomllib.loads(text)})
    except tomllib.TOMLDecodeError as error:
        raise HarnessError(f"harness {name}: its file is not valid TOML: {error}") from error
    except ValidationError as error:
        raise HarnessError(f"harness {name}: " + "; ".join(_explain(dict(item)) for item in error.errors())) from error


def _explain(item: dict[str, Any]) -> str:
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    if item["type"] == "missing":
        return f"key {key!r} is missing"
    if item["type"] != "extra_forbidden":
        return f"{key}: {item['msg']} (value {item['input']!r})"
    table = {"install": Install, "threads": ThreadRule, "filters": Filter}.get(path[0] if path[1:] else "", Harness)
    nearest = difflib.get_close_matches(path[-1], table.model_fields, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys here: {', '.join(table.model_fields)}"
    return f"unknown key {key!r} (value {item['input']!r}); {hint}"
