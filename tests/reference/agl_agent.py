"""An agent as Agent Lightning's users write it: a class with `run`, told everything by its environment."""

import os

import httpx


class Agent:
    def run(self):
        headers = {"authorization": f"Bearer {os.environ['AGL_KEY']}"}
        messages = [{"role": "user", "content": os.environ["QUESTION"]}]
        with httpx.Client(headers=headers, timeout=60, trust_env=False) as http:
            for _ in range(2):
                url = f"{os.environ['AGL_OPENAI_BASE_URL']}/chat/completions"
                answer = http.post(url, json={"model": "any", "messages": messages}).raise_for_status().json()
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
            reward = {"event_type": "reward", "data": {"value": 0.5}}
            http.post(os.environ["AGL_EVENT_URL"], json=reward).raise_for_status()
