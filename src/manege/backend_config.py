"""The section `backend` of a run file: what trains and what serves, and on how many machines (docs/guides/scale.md).

The agent, the tasks and the credit settings of a run know nothing of it.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from manege.section import PositiveFloat, PositiveInt, Section

__all__ = ["BackendConfig", "EngineServersConfig"]


class EngineServersConfig(Section):
    """Engine servers that the run starts and stops; those that run already are named by gateway.engine_url."""

    kind: Literal["vllm", "sglang", "manege"] = "vllm"
    """`manege`: `manege engine`, for machines without a GPU."""
    count: Annotated[int, Field(ge=0)] = 0
    """How many; 0: none."""
    tensor_parallel: PositiveInt = 1
    """GPUs of each."""
    python: str | None = None
    """The interpreter of the environment that has the server; None: this one."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the server's own command line: `max_num_seqs = 64` is passed on as `--max-num-seqs 64`, `true` as a flag."""
    start_s: PositiveFloat = 900
    """How long the start of a server may take."""


class BackendConfig(Section):
    """What trains: `torch` on one machine, `verl` (with Ray) on one or many."""

    kind: Literal["torch", "verl"] = "torch"
    nodes: PositiveInt = 1
    """Machines that train; `torch` has one."""
    ranks_per_node: PositiveInt = 1
    """Processes that train on each, with a GPU each (or none, with model.device = "cpu")."""
    strategy: Literal["fsdp2", "megatron"] = "fsdp2"
    """`verl`: how the model is divided among the ranks."""
    ray_address: str | None = None
    """`verl`: of a Ray cluster that runs, or `auto`; None: Ray is started on this machine for the run."""
    colocated: bool = False
    """`verl`: engines and ranks share GPUs. The engines sleep while the ranks work, whose state is in the machine's
    memory meanwhile."""
    weights: Literal["folder", "transfer"] = "folder"
    """How `engines` of kind `vllm` get new weights: from a folder of the run's, or from memory to memory, which needs
    `torch`."""
    timeout_s: PositiveFloat = 1800
    """A call of the ranks that takes longer has hung; it ends the run, which can be resumed."""
    verl: dict[str, Any] = Field(default_factory=dict)
    """Keys of verl's own configuration of a training worker, by section: `engine`, `optimizer`, `model`,
    `checkpoint`. They win over ours."""
    engines: EngineServersConfig = EngineServersConfig()

    @model_validator(mode="after")
    def _only_what_does_something(self) -> "BackendConfig":
        if self.kind == "torch":
            unused = ("nodes", "strategy", "ray_address", "colocated", "verl")
            for key in unused if self.num_ranks > 1 else (*unused, "timeout_s"):
                if (value := getattr(self, key)) != BackendConfig.model_fields[key].get_default(
                    call_default_factory=True
                ):
                    needs = "several ranks" if key == "timeout_s" else 'kind = "verl"'
                    raise ValueError(f"{key} = {value!r} does nothing here: it needs {needs}")
        if self.colocated and not self.engines.count:
            raise ValueError("colocated = true does nothing here: it needs engines.count, engines that the run starts")
        if self.weights == "transfer" and (
            self.kind == "verl" or self.engines.kind != "vllm" or not self.engines.count
        ):
            raise ValueError(
                'weights = "transfer" needs kind = "torch", engines.kind = "vllm" and engines.count, servers that the '
                'run starts; all others read a "folder"'
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Processes that train, in all."""
        return self.nodes * self.ranks_per_node
