"""The tiny agent, which also asks beside its work. One in eight says nothing, one in eight gets no verdict."""

import hashlib
import json
import os
import sys
import urllib.request

import tiny_agent
import tiny_tasks


def main():
    kind = int(hashlib.sha256(os.environ["MANEGE_ROLLOUT_ID"].encode()).hexdigest(), 16) % 8
    if kind == 0:
        sys.exit("fails before its first call")
    if kind == 1:
        print("no verdict")
    body = json.dumps({"model": "default", "messages": [{"role": "user", "content": "q z"}], "max_tokens": 4}).encode()
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        body,
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        response.read()
    tiny_agent.main()


def score(task, attempt):
    return None if "no verdict" in attempt.stdout else tiny_tasks.score(task, attempt)
