"""Our side of the benchmark of reading calls: the store is filled before its gateway starts, and `Client` reads."""

import asyncio
import functools
import sys

import httpx
import uvloop
from calls_read_rollouts import text_of
from gateway_latency import KEY
from sample_building_serve import serve

from manege.client import Client
from manege.store.base import Ending
from manege.store.sql import SqlStore
from manege.types import Call, Delivered, FinishReason, Outcome, RolloutSpec, Task, VersionSpan


async def fill(path, rollouts):
    """Ended rollouts r0, r1 ... with their calls; of a prompt that goes on, the request keeps what is new."""
    names = [f"r{number}" for number in range(len(rollouts))]
    store = await SqlStore.open(path)
    await store.create_rollouts([RolloutSpec(id=name, run="run", task=Task(id="t", input={})) for name in names])
    await store.claim(controller="c", limit=len(names), lease_s=600)
    for name, calls in zip(names, rollouts, strict=True):
        await asyncio.gather(*(store.add_call(call) for call in our_calls(name, calls)))
        await store.finish(name, 0, Ending(outcome=Outcome.OK, reward=1.0))
    await store.close()


def our_calls(name, calls):
    end = 0
    for number, call in enumerate(calls):
        goes_on = number > 0 and len(call.prompt) > end
        new = call.prompt[end:] if goes_on else call.prompt
        end = len(call.prompt) + len(call.response)
        yield Call(
            id=f"{name}-{number}",
            rollout_id=name,
            attempt=0,
            parent=f"{name}-{number - 1}" if goes_on else None,
            protocol="chat",
            mode="train",
            prompt_ids_P=call.prompt,
            response_ids_R=call.response,
            logprobs_R=call.logprobs,
            spans=[VersionSpan(first_token=0, version=1)],
            temperature=1.0,
            finish_reason=FinishReason.STOP,
            delivered=Delivered.YES,
            request={"model": "m", "messages": [{"role": "user", "content": text_of(new)}]},
            reply={"role": "assistant", "content": text_of(call.response)},
            created_s=0.0,
            ended_s=0.0,
        )


@functools.cache
def connect():
    """As in a training: a client lives longer than one read, and the loop is uvloop's."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop), Client(sys.argv[2], KEY)


def load(rollouts, _rewards):
    names = [f"r{number}" for number in range(len(rollouts))]
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{sys.argv[2]}/api/calls", json={"rollout_ids": names}, headers=headers, timeout=600)
    return *connect(), names, len(answer.raise_for_status().content)


def read(loaded):
    runner, client, names, num_bytes = loaded
    found = runner.run(client.calls(names))
    calls = [call for calls in found.values() for call in calls]
    return {"bytes": num_bytes, "calls": len(calls), "tokens": sum(len(call.prompt_ids_P) for call in calls)}


if __name__ == "__main__":
    serve(load, read)
