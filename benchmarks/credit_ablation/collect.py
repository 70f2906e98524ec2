"""Groups of rollouts without gateway or HTTP: the agents run in this process and ask a `LocalEngine` for tokens.

What comes out is what a real run gives the trainer: groups of rollouts with the exact ids and log-probabilities of each
call. Only the credit code behind it is under study, and that is the real one.
"""

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.credit_ablation.agent import MAX_REPLY_TOKENS, Messages, lead
from benchmarks.credit_ablation.tasks import read, reward
from manege.engine.base import Engine, Sampling, collect
from manege.model.folder import ModelFolder
from manege.trainer.collect import Group
from manege.types import (
    Call,
    CallId,
    Delivered,
    FinishReason,
    IntArray,
    Outcome,
    Rollout,
    RolloutId,
    RolloutSpec,
    RolloutState,
    RunId,
    Task,
)

__all__ = ["Player"]


class Player:
    """Plays tasks with whatever weights the engine has."""

    def __init__(self, engine: Engine, folder: ModelFolder, *, temperature: float = 1.0) -> None:
        self._engine, self._tokenizer = engine, folder.tokenizer
        self._sampling = Sampling(temperature=temperature, max_new_tokens=MAX_REPLY_TOKENS, stop_ids=folder.eos_ids)
        [self._end_id] = folder.eos_ids
        self._numbers = itertools.count()

    async def groups(self, tasks: Sequence[Task], size: int) -> Sequence[Group]:
        """`size` rollouts of each task, all at once."""
        played = await asyncio.gather(*(self._rollout(task) for task in tasks for _ in range(size)))
        return [
            Group(
                task=task,
                rollouts=[rollout for rollout, _ in played[index * size : (index + 1) * size]],
                calls=[calls for _, calls in played[index * size : (index + 1) * size]],
            )
            for index, task in enumerate(tasks)
        ]

    async def _rollout(self, task: Task) -> tuple[Rollout, Sequence[Call]]:
        id = RolloutId(f"r{next(self._numbers)}")
        calls: list[Call] = []
        heard: dict[Messages, Call] = {}
        agent = lead(task.input["letters"], partial(read, task))
        try:
            messages = next(agent)
            while True:
                call = await self._call(id, len(calls), messages, heard.get(messages[:-1]))
                calls.append(call)
                reply = ("assistant", call.reply["content"])
                heard[(*messages, reply)] = call
                messages = agent.send(reply[1])
        except StopIteration as ended:
            return _rollout(id, task, reward(task, ended.value)), calls

    async def _call(self, rollout: RolloutId, number: int, messages: Messages, parent: Call | None) -> Call:
        prompt = np.concatenate([_ended(parent, self._end_id), self._turn(messages[-1][1])])
        answer = await collect(self._engine.generate(prompt.tolist(), self._sampling))
        text = self._tokenizer.decode(answer.ids_R.tolist(), skip_special_tokens=True)
        return Call(
            id=CallId(f"{rollout}.{number}"),
            rollout_id=rollout,
            attempt=0,
            parent=parent.id if parent else None,
            protocol="chat",
            mode="train",
            prompt_ids_P=prompt,
            response_ids_R=answer.ids_R,
            logprobs_R=answer.logprobs_R,
            spans=answer.spans,
            temperature=self._sampling.temperature,
            finish_reason=answer.finish_reason,
            delivered=Delivered.YES,
            request={},
            reply={"role": "assistant", "content": text},
            created_s=0.0,
            ended_s=0.0,
        )

    def _turn(self, text: str) -> IntArray:
        """What a user's message adds to the conversation, and the opening of the answer."""
        return np.asarray(self._tokenizer.encode(f"<|user|>{text}<|end|><|assistant|>").ids, np.int32)


def _ended(parent: Call | None, end_id: int) -> IntArray:
    """The conversation so far; an answer that was cut off is closed."""
    if parent is None:
        return np.empty(0, np.int32)
    closing = [end_id] if parent.finish_reason is FinishReason.LENGTH else []
    return np.concatenate([parent.prompt_ids_P, parent.response_ids_R, closing]).astype(np.int32)


def _rollout(id: RolloutId, task: Task, reward: float) -> Rollout:
    return Rollout(
        spec=RolloutSpec(id=id, run=RunId("credit-ablation"), task=task),
        state=RolloutState.SUCCEEDED,
        attempt=0,
        outcome=Outcome.OK,
        reward=reward,
        created_s=0.0,
    )
