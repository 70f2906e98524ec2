"""Agent Lightning's side of the benchmark of sample building, run by its own interpreter: its adapter, unchanged.

At the level `trajectory` (its default), padded to the smallest widths at which it loses none of these rollouts.
"""

import torch
from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet
from agentlightning.verl.rollout_adapter import RolloutAdapter
from sample_building_rollouts import GROUP_SIZE, smallest_widths
from sample_building_serve import serve


def load(rollouts, rewards):
    """Lists of Python numbers in its own models, as its rollout manager has them after parsing JSON."""
    completed = [
        CompletedRollout(
            rollout_id=f"r{index}",
            data_id=f"g{index // GROUP_SIZE}",
            step=0,
            sample_idx_in_step=index,
            enqueue_time=0.0,
            final_reward=reward,
            triplets=[triplet(call) for call in rollout],
        )
        for index, (rollout, reward) in enumerate(zip(rollouts, rewards, strict=True))
    ]
    return completed, smallest_widths(rollouts)


def triplet(call):
    response = {"token_ids": call.response.tolist(), "log_probs": call.logprobs.tolist(), "routed_experts": None}
    return Triplet(prompt={"token_ids": call.prompt.tolist()}, response=response)


def build(loaded):
    completed, (max_prompt_length, max_response_length) = loaded
    adapter = RolloutAdapter(
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level="trajectory",
    )
    batch, _ = adapter.get_train_data_batch(completed)
    return {"samples": len(batch), "trained": int(batch.batch["response_mask"].sum())}


if __name__ == "__main__":
    serve(load, build)
