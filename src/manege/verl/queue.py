"""Rows into verl's TransferQueue, in the shape that its agent loops give them.

A prompt is a key (`uid`) with a status only; a row is a key `{uid}_{session}_{index}` with fields and a tag. Fields are
verl's own, ours (`credit.FIELDS`), and all that the dataset gave with the prompt. With our advantage estimator the
field `uid` of a row for training is the row's key, by which the estimator finds the row again: verl hands it nothing
else. verl's estimators find groups by it.
"""
# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from manege.verl.credit import FIELDS
from manege.verl.rows import Row

if TYPE_CHECKING:
    from manege.verl.service import Prompt

__all__ = ["Put"]


class Put:
    """Writes into the queue of this process, which verl's trainer has set up."""

    def __init__(self, *, ours: bool, filler_id: int) -> None:
        """`ours`: advantages are those of manege; `filler_id`: a token, for rows that train nothing."""
        self._ours, self.filler_id = ours, filler_id

    async def mark(self, prompt: "Prompt", status: str) -> None:
        """`running`, `finished` or `failure`."""
        import transfer_queue as queue

        await queue.async_kv_put(key=prompt.uid, partition_id=_partition(prompt), tag={"status": status})

    async def rows(self, prompt: "Prompt", rows: Sequence[Row]) -> None:
        """All of a group, at once."""
        import transfer_queue as queue
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        keys = [f"{prompt.uid}_{row.session}_{row.index}" for row in rows]
        await queue.async_kv_batch_put(
            keys=keys,
            fields=list_of_dict_to_tensordict(
                [self._fields(prompt, row, key) for row, key in zip(rows, keys, strict=True)]
            ),
            tags=[_tag(prompt, row) for row in rows],
            partition_id=_partition(prompt),
        )

    def _fields(self, prompt: "Prompt", row: Row, key: str) -> Mapping[str, Any]:
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

        output = AgentLoopOutput(
            prompt_ids=row.prompt_ids_P.tolist(),
            response_ids=row.response_ids_R.tolist(),
            response_mask=row.mask_R.tolist(),
            response_logprobs=row.logprobs_R.tolist(),
            reward_score=row.reward,
            num_turns=row.num_calls,
            metrics=AgentLoopMetrics(),
            extra_fields={"reward_extra_info": {}},
        ).as_dict()
        ids_T = torch.cat([output["prompts"], output["responses"]])
        advantages, share = FIELDS
        return {
            **prompt.fields,
            **output,
            "session_id": row.session,
            "uid": key if self._ours and prompt.is_train else prompt.uid,
            "loss_mask": output["response_mask"],
            "input_ids": ids_T,
            "position_ids": torch.arange(len(ids_T)),
            "multi_modal_inputs": {},
            advantages: torch.from_numpy(row.advantages_R),
            share: row.share.to_json(),
        }


def _tag(prompt: "Prompt", row: Row) -> Mapping[str, Any]:
    # The weights in service when it was drawn are those of the step before.
    oldest, newest = row.versions or (max(0, prompt.step - 1),) * 2
    num_prompt, num_response = len(row.prompt_ids_P), len(row.response_ids_R)
    return {
        "status": "success",
        "prompt_len": num_prompt,
        "response_len": num_response,
        "seq_len": num_prompt + num_response,
        "global_steps": prompt.step,
        "min_global_steps": oldest,
        "max_global_steps": newest,
    }


def _partition(prompt: "Prompt") -> str:
    return "train" if prompt.is_train else "val"
