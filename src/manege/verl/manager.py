"""What verl calls in the place of its own agent loops.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=manege.verl.manager.AgentLoopManager

It lives in verl's task runner. Gateway, controller and all that waits for rollouts run in an event loop in a thread of
their own, so that agents go on while the trainer's thread waits for an update. `generate_sequences` returns when its
prompts are queued at the gateway.
"""
# pyright: reportMissingImports=false

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from omegaconf import DictConfig

from manege.errors import TrainerError
from manege.logs import get_logger, setup
from manege.verl.service import Prompt, Rollouts, rollouts_for
from manege.verl.settings import read_settings

__all__ = ["AgentLoopManager"]

_log = get_logger("verl")
T = TypeVar("T")


class AgentLoopManager:
    """See the module. Its methods are verl's contract (verl/trainer/main_ppo.py, TaskRunnerV1)."""

    @classmethod
    def create(
        cls, config: DictConfig, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> Self:
        """Returns when gateway and controller run. Raises ConfigError for what cannot be carried out."""
        if teacher_client:
            raise TrainerError("distillation from a teacher is not done with agents of manege; set distillation off")
        setup()
        return cls(config, llm_client)

    def __init__(self, config: DictConfig, client: Any) -> None:
        self._config = config
        self._run = read_settings(config)
        self._loop = asyncio.new_event_loop()
        self._ready: Future[Rollouts] = Future()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=(client,), name="manege-rollouts", daemon=True)
        self._thread.start()
        self._rollouts = self._ready.result()

    def generate_sequences(self, prompts: Any) -> None:
        """`prompts`: a TensorDict of dataset rows with `uid` and `global_steps`. Raises TrainerError when rollouts have
        come to an end."""
        if self._ended is not None:
            raise TrainerError(f"the rollouts ended: {self._ended}") from self._ended
        validate, step = bool(_scalar(prompts, "validate", False)), int(_scalar(prompts, "global_steps", 0))
        drawn = [self._prompt(fields, is_train=not validate, step=step) for fields in _rows(prompts)]
        self._do(self._rollouts.start(drawn))

    def _prompt(self, fields: Mapping[str, Any], *, is_train: bool, step: int) -> Prompt:
        rollout = self._config.actor_rollout_ref.rollout
        size = rollout.n if is_train else rollout.val_kwargs.n
        temperature = rollout.temperature if is_train else rollout.val_kwargs.temperature
        return Prompt(
            uid=str(fields["uid"]),
            fields=fields,
            is_train=is_train,
            step=step,
            group_size=int(fields.get("__rollout_n__", size)),
            temperature=float(temperature),
        )

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _serve(self, client: Any) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._hold(client))
        except BaseException as error:  # the trainer's thread asks for it
            self._ended = error
            if not self._ready.done():
                self._ready.set_exception(error)
            _log.error("the rollouts ended: %s", error)

    async def _hold(self, client: Any) -> None:
        async with rollouts_for(self._config, self._run, client) as rollouts:
            self._ready.set_result(rollouts)
            await asyncio.Event().wait()


def _rows(prompts: Any) -> Sequence[Mapping[str, Any]]:
    """Each row's fields, as Python values and tensors."""
    columns = {key: _column(prompts, key) for key in prompts.keys() if key != "validate"}  # noqa: SIM118 - no dict
    return [{key: column[row] for key, column in columns.items()} for row in range(len(prompts))]


def _column(prompts: Any, key: str) -> Sequence[Any]:
    from tensordict import NonTensorData, NonTensorStack

    value = prompts.get(key)
    if isinstance(value, NonTensorStack):
        return [item.data if isinstance(item, NonTensorData) else item for item in value]
    if isinstance(value, NonTensorData):
        return [value.data] * len(prompts)
    return list(value)


def _scalar(prompts: Any, key: str, default: Any) -> Any:
    from tensordict import NonTensorData

    if key not in prompts.keys():  # noqa: SIM118 - no dict
        return default
    value = prompts.get(key)
    value = value.data if isinstance(value, NonTensorData) else value[0]
    return getattr(value, "data", value)
