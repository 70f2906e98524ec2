"""The sections `agent`, `services`, `scorer` and `sandbox` of a run file: what runs, what it asks, what judges it, and
what it may touch."""

from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from manege.section import PositiveFloat, PositiveInt, Section

__all__ = [
    "AgentConfig",
    "LimitsConfig",
    "Program",
    "SandboxConfig",
    "ScorerConfig",
    "ServiceConfig",
    "ServiceName",
    "WorkspaceConfig",
]

T = TypeVar("T", bound=Iterable[str])

Program = str | list[str]
"""`"module:function"`, run from a warm parent, or a command as a list of arguments."""


class LimitsConfig(Section):
    """What an attempt may use. Each stage has its own budget."""

    setup_s: PositiveFloat = 60
    run_s: PositiveFloat = 600
    score_s: PositiveFloat = 60
    cleanup_s: PositiveFloat = 20
    memory_mb: PositiveInt = 4096
    """Memory of all its processes together where the machine has cgroups, else address space of each."""
    num_processes: PositiveInt = 256
    """At once. In a cgroup a fork beyond it fails (four threads may go with each), else the attempt ends."""
    file_mb: PositiveInt = 1024
    """Size of one file that the agent writes."""
    num_files: PositiveInt = 1024
    """Open files of one process."""
    cpus: PositiveFloat | None = None
    """Cores' worth of time, of all its processes together, where the machine has cgroups; None: no limit."""
    output_mb: PositiveInt = 16
    """stdout and stderr kept per attempt; more is cut."""


class WorkspaceConfig(Section):
    """What an agent's workspace holds when it begins. It is made once for equal contents, and each rollout gets a view
    or a cheap copy of it; in `source` and `commit`, `{field}` is replaced by that field of the task's input."""

    source: str
    """A folder, an archive (.tar, .tar.gz, .tar.xz, .tar.zst, .zip) or a Git repository (with `commit`); a relative
    path is relative to the run file. Its `.git` is never part of the workspace."""
    commit: str | None = None
    """A commit, tag or branch of the repository `source`, a path or a URL."""
    setup: list[list[str]] = Field(default_factory=list)
    """Commands run in it one after another, once, before any agent sees it."""


class AgentConfig(Section):
    """The program that is trained in place; manege never looks inside."""

    run: Program | None = None
    """A command (list of arguments; files beside the run file by their relative path, and a script may import what lies
    beside it), or `module:function` forked from a warm parent."""
    harness: str | None = None
    """Instead of `run`: a known harness, by its name (`manege harness list`)."""
    task: str | None = None
    """What a harness is told; `{field}` is replaced by that field of the task's input. None: its field `task` or
    `prompt`."""
    common_prompts: bool = False
    """Take dates and session ids out of a known harness's prompts, so that the rollouts of a group begin alike."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the agent; `{field}` is replaced by that field of the task's input, and `{PATH}`, on this machine,
    by what that would be without."""
    setup: Program | None = None
    """Run before the agent, outside its sandbox, to prepare the workspace: f(task, workspace)."""
    workspace: WorkspaceConfig | None = None
    """What the workspace holds before `setup`; None: nothing."""
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _one_program(self) -> "AgentConfig":
        if (self.run is None) == (self.harness is None):
            raise ValueError("name the agent's program: set either run or harness")
        if self.task is not None and self.harness is None:
            raise ValueError("task is what a harness is told: it needs harness")
        return self


ServiceName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=32)]
"""A part of the address and of the variable's name."""


class ServiceConfig(Section):
    """A tool over HTTP that agents reach through the gateway, at the address in MANEGE_SERVICE_<NAME>."""

    url: str | None = None
    """Where it is, as seen by the gateway."""
    run: list[str] | None = None
    """Instead of `url`: a command that the run starts, keeps alive and ends; `{port}` is replaced by the port of
    127.0.0.1 where it shall listen, `{folder}` by the run folder. It is ready when it answers GET /healthz."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """For `run`; 0: a free one."""
    start_s: PositiveFloat = 900
    """How long the start of `run` may take."""
    timeout_s: PositiveFloat = 60
    """How long an agent's request may wait for it, or for its next bytes."""

    @model_validator(mode="after")
    def _one_place(self) -> "ServiceConfig":
        if (self.url is None) == (self.run is None):
            raise ValueError("say where the service is: set either url or run")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r} is no address; write http://HOST:PORT")
        if self.url is not None and (self.port or self.start_s != ServiceConfig.model_fields["start_s"].default):
            raise ValueError("port and start_s do nothing here: they need run")
        if self.run is not None and not any("{port}" in word for word in self.run):
            raise ValueError("run must tell the service where to listen: put {port} into it")
        return self

    @property
    def address(self) -> str:
        """Where the gateway finds it."""
        return self.url or f"http://127.0.0.1:{self.port}"


class ScorerConfig(Section):
    """The program that judges what an attempt left behind."""

    run: Program
    """`module:function` called as f(task, attempt) -> float | None, or a command that prints a JSON number or null as
    its last line; or an object {"reward": ..., "calls": {id: number}, "message": "one line", "hacks": ["tests were
    faked"]}, of which all but the first may be left out; `hacks` go into the hack report. A command with `{verdict}` in
    it finds the number of a descriptor there, and writes it to that."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files of the workspace that only the scorer gets: path to text; `{field}` is replaced by that field of the task,
    hidden ones included."""
    restore: list[str] = Field(default_factory=list)
    """Paths of the workspace that the scorer finds as they were before the agent (`tests/**`, `conftest.py`): what it
    changed there is undone, what it added is gone, and it is reported."""
    readable: list[str] = Field(default_factory=list)
    """Files and folders that the scorer may read beside workspace, system, interpreter and its own code; relative to
    the run file."""
    network: bool = False
    """Let it reach the network, for a judge elsewhere."""
    reward_from: Literal["scorer", "agent"] = "scorer"
    """`agent`: the agent posts its own `reward` event, as agents written for Agent Lightning do."""
    success_reward: float = 1.0
    """A rollout with at least this reward counts as a success in the tables."""

    @field_validator("files", "restore")
    @classmethod
    def _inside(cls, paths: T) -> T:
        for path in paths:
            if {"", ".", ".."} & set(path.split("/")):
                raise ValueError(
                    f"{path!r} is no path in the workspace; write it relative to that, without `.` and `..`"
                )
        return paths


class SandboxConfig(Section):
    """Isolation of agents."""

    mode: Literal["auto", "strict", "off"] = "auto"
    """`auto`: all layers that this machine has; without Landlock and seccomp a run needs `unsafe`. `strict`: none may
    be missing that keeps an agent from files, processes or networks."""
    unsafe: bool = False
    """Run agents even where they cannot be isolated (`--unsafe`)."""
    readable: list[str] = Field(default_factory=list)
    """Files and folders outside the workspace that agents may read, beside system folders, the interpreter and their
    code; relative to the run file."""
