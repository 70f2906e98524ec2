"""What Agent Lightning's trainer asks of its server, with its own client: run under its own Python.

python agl_trainer.py GATEWAY KEY ENDPOINT   -> the triplets of each rollout as JSON
"""

import json
import sys
import time

from agentlightning.client import AgentLightningSyncClient
from agentlightning.schemas import Event, Rollout


def main(gateway, key, endpoint):
    with AgentLightningSyncClient(key=key, base_url=gateway, timeout=30, trust_env=False) as api:
        api.post_with_retry("/api/models", json=[{"model": "m", "endpoint": f"{endpoint}/v1"}])
        local = {"agent_class": "agl_agent:Agent", "env_map": {"QUESTION": "input.question"}}
        created = [
            {"input": {"question": f"say {n}"}, "config": {"timeout_seconds": 60, "local": local}, "is_train": True}
            for n in range(3)
        ]
        made = api.post_with_retry("/api/rollouts", json=created).json()
        waiting = {Rollout.model_validate(item).rollout_id for item in made}
        after, states = 0, {}
        while waiting - set(states):
            page = api.get("/api/rollouts/terminal", params={"after": after}).json()
            states |= {item["rollout_id"]: item["state"] for item in page["items"]}
            after = page["next_after"]
            time.sleep(0.2)
        api.post_with_retry("/proxy/pause")
        while api.get("/proxy/state").json()["inflight"]:
            time.sleep(0.1)
        api.post_with_retry("/proxy/resume")
        found = {}
        for rollout_id in waiting:
            events = api.get(f"/api/rollouts/{rollout_id}/events", params={"format": "triplet"}).json()
            [Event.model_validate(event) for event in events]
            found[rollout_id] = [event["data"] for event in events]
    print(json.dumps({"states": states, "triplets": found}))


main(*sys.argv[1:])
