"""Agent Lightning's side of the benchmark of reading calls, run by its own interpreter: its rollout manager, unchanged.

Its server gets the events as its proxy records them, through its own API, from the first reader that asks.
"""

import functools
import sys
import time

from agentlightning.verl.agl_rollout_manager import AglRolloutManagerBase, EnqueuedRollout
from calls_read_rollouts import text_of
from sample_building_serve import serve

KEY = "mo-benchmark"
"""As in `gateway_latency.py`, which needs what this interpreter lacks."""


@functools.cache
def connect():
    """As in a training, a client lives longer than one read."""
    return AglRolloutManagerBase(agl_base_url=sys.argv[2], agl_key=KEY, model="m", step=0)


def load(rollouts, _rewards):
    manager = connect()
    names = [f"r{number}" for number in range(len(rollouts))]
    if manager.client.get(f"/api/rollouts/{names[0]}").is_error:
        fill(manager.client, names, rollouts)
    return manager, names


def fill(client, names, rollouts):
    for name, calls in zip(names, rollouts, strict=True):
        client.post("/api/rollouts", json=[{"input": {}, "rollout_id": name}]).raise_for_status()
        for call in calls:
            body = {"event_type": "model_request", "data": event(call)}
            client.post(f"/api/rollouts/{name}/attempt/0/events", json=body).raise_for_status()


def event(call):
    logprobs = [{"token": "t", "logprob": logprob, "bytes": [116]} for logprob in call.logprobs.tolist()]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text_of(call.response)},
        "finish_reason": "stop",
        "token_ids": call.response.tolist(),
        "logprobs": {"content": logprobs},
    }
    return {
        "model": "m",
        "server": {"model": "m", "version": 1},
        "request": {"model": "m", "messages": [{"role": "user", "content": text_of(call.prompt)}]},
        "response": {"id": "c", "prompt_token_ids": call.prompt.tolist(), "choices": [choice]},
        "http_status": 200,
        "status": "success",
        "retry_count": 0,
    }


def read(loaded):
    manager, names = loaded
    sizes = []
    manager.client.event_hooks = {"response": [lambda answer: sizes.append(int(answer.headers["content-length"]))]}
    if sys.argv[3] == "whole":
        rollouts = [completed(manager, name) for name in names]
        prompts = [each.prompt["token_ids"] for rollout in rollouts for each in rollout.triplets]
    else:
        events = [manager._get_events(name, format="triplet") for name in names]
        prompts = [each.data["prompt_token_ids"] for some in events for each in some]
    return {"bytes": sum(sizes), "calls": len(prompts), "tokens": sum(map(len, prompts))}


def completed(manager, name):
    asked = EnqueuedRollout(data_id="d", rollout_id=name, step=0, sample_idx_in_step=0, enqueue_time=time.time())
    return manager._build_completed_rollout(asked, manager._get_rollout(name))


if __name__ == "__main__":
    serve(load, read)
