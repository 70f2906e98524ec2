"""An agent of the standard library only: looks letters up in the files of its folder until it can answer."""

import json
import os
import re
import urllib.request
from pathlib import Path


def main():
    messages = [{"role": "user", "content": f"q {os.environ['FIRST']}"}]
    for _ in range(4):
        body = json.dumps({"model": "default", "messages": messages, "max_tokens": 10}).encode()
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            body,
            {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            reply = json.load(response)["choices"][0]["message"]["content"]
        found = re.fullmatch(r"get ([a-z])", reply)
        if not found:
            print(reply)
            return
        file = Path(found[1])
        shown = file.read_text() if file.exists() else "no"
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": shown}]
