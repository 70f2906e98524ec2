"""An agent that answers questions by a search service, over several turns.

An ordinary program. It takes its model endpoint from OPENAI_BASE_URL and OPENAI_API_KEY, the service's address from
MANEGE_SERVICE_SEARCH and its question from QUESTION; its answer is the last line on stdout. With SEARCH_PROTOCOL=tools
the model calls a tool and answers in words; with `text` it begins its reply with `search` or `answer`, for models that
know no tools, which are shown how. SEARCH_TOP_K, MAX_TURNS and MAX_REPLY_TOKENS bound what it sees and says.
"""

import json
import os
import re
import sys
import urllib.request
from typing import Any

from openai import OpenAI

WITH_TOOLS = (
    "Answer the question. Search as often as you need, for one thing at a time; passages may lead to others. "
    "When you know the answer, reply with the answer alone: a name or a few words, without a sentence around it."
)
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find passages of the corpus.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for."}},
            "required": ["query"],
        },
    },
}
WITH_TEXT = "Look up facts. Reply with one line only: search name, or answer name."
DEMONSTRATION = [
    ("Where is Bell Tea House based?", "search Bell Tea House"),
    ("Bell Tea House is based in Lyon. Bell Tea House sells tea.", "answer Lyon"),
    ("Where is the employer of Ivan Petrov based?", "search Ivan Petrov"),
    ("Ivan Petrov likes to swim. Ivan Petrov works for Globe Music Store.", "search Globe Music Store"),
    ("Globe Music Store is based in Paris. Globe Music Store opened in 1950.", "answer Paris"),
    ("Who is the employer of Tim Young?", "search Tim Young"),
    ("Tim Young works for Happy Boat Club. Tim Young plays chess.", "answer Happy Boat Club"),
    ("Who is the mayor of the town where Red Lamp Studio is based?", "search Red Lamp Studio"),
    ("Red Lamp Studio is based in Porto. Red Lamp Studio makes films.", "search Porto"),
    ("Porto has a market. The mayor of Porto is Nina Costa.", "answer Nina Costa"),
]


def main() -> None:
    """Search until the model answers, or has no turn left."""
    by_text = os.environ.get("SEARCH_PROTOCOL", "tools") == "text"
    answer = answer_by_text(os.environ["QUESTION"]) if by_text else answer_by_tools(os.environ["QUESTION"])
    if answer is not None:
        print(answer)


def setting(name: str, default: int) -> int:
    """Read when it is needed: the module may be imported before the environment of a rollout is there."""
    return int(os.environ.get(name, default))


def answer_by_tools(question: str) -> str | None:
    """The first reply without a tool call."""
    client = OpenAI()
    messages: list[Any] = [{"role": "system", "content": WITH_TOOLS}, {"role": "user", "content": question}]
    tools: list[Any] = [TOOL]
    for _ in range(setting("MAX_TURNS", 6)):
        completion = client.chat.completions.create(
            model="default", messages=messages, tools=tools, max_tokens=setting("MAX_REPLY_TOKENS", 500)
        )
        reply = completion.choices[0].message
        if not reply.tool_calls:
            return " ".join((reply.content or "").split())
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            found = search_for(call.function.arguments) if call.type == "function" else "there is no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    print("no turn left", file=sys.stderr)
    return None


def answer_by_text(question: str) -> str | None:
    """What follows `answer`; a reply that is neither ends the work."""
    client = OpenAI()
    messages: list[Any] = [{"role": "system", "content": WITH_TEXT}]
    for asked, replied in DEMONSTRATION:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": replied}]
    messages.append({"role": "user", "content": question})
    for _ in range(setting("MAX_TURNS", 6)):
        completion = client.chat.completions.create(
            model="default", messages=messages, max_tokens=setting("MAX_REPLY_TOKENS", 500)
        )
        reply = completion.choices[0].message.content or ""
        said = re.match(r"\s*(search|answer)[ :]+([^\n]*\w[^\n]*)", reply, re.IGNORECASE)
        if said is None:
            print(f"neither search nor answer: {reply!r}", file=sys.stderr)
            return None
        if said[1].lower() == "answer":
            return said[2].strip()
        found = "\n".join(passage["text"] for passage in passages_on(said[2])) or "nothing was found"
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": found}]
    print("no turn left", file=sys.stderr)
    return None


def search_for(arguments: str) -> str:
    """What a tool call gets, also one that is not well formed."""
    try:
        query = json.loads(arguments)["query"]
    except (ValueError, KeyError, TypeError):
        return 'the arguments must be {"query": "what to look for"}'
    return search(str(query))


def search(query: str) -> str:
    """The best passages with their titles, one a line."""
    found = [f"{passage['title']}: {passage['text']}" for passage in passages_on(query)]
    return "\n".join(found) or "nothing was found"


def passages_on(query: str) -> list[dict[str, Any]]:
    """The best ones first."""
    request = urllib.request.Request(
        os.environ["MANEGE_SERVICE_SEARCH"] + "/search",
        json.dumps({"queries": [query], "top_k": setting("SEARCH_TOP_K", 3)}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        [passages] = json.load(response)["results"]
    return passages


if __name__ == "__main__":
    main()
