"""The Gemini API: generateContent, streamGenerateContent and countTokens (https://ai.google.dev/api/generate-content).

The route says whether and how an answer is streamed, not the body, so there is one `Gemini` per route. Fields are read
as `camelCase`, which Google's clients send, and as `snake_case`, which the API also takes. Thinking budgets, safety
settings and labels stay in `raw`; tools that Google runs are left out with a note.

Contents that end with the model's turn get another answer after it, not its continuation: templates close every turn.
"""

from collections.abc import Sequence

from manege.errors import ManegeError
from manege.protocols.base import AskedSampling, ModelReply, ModelRequest, ReplyHead, ServedModel
from manege.protocols.gemini_contents import mapping, read_contents, read_system
from manege.protocols.gemini_reply import Form, GeminiStream, error_body, response_body
from manege.protocols.gemini_tools import json_schema, read_tools
from manege.protocols.values import flag, integer, number, shown, text, texts, wrong
from manege.types import JsonObject

__all__ = ["Gemini"]

_CONFIG = "generationConfig"
_PENALTIES = {"presencePenalty": "presence_penalty", "frequencyPenalty": "frequency_penalty"}


class Gemini:
    """See `protocols.base.WireProtocol`."""

    name = "gemini"

    def __init__(self, stream: Form | None = None) -> None:
        """`stream`: how streamGenerateContent answers, `sse` with `?alt=sse` and `array` without; None elsewhere."""
        self._form: Form | None = stream

    def parse(self, raw: JsonObject) -> ModelRequest:
        body = mapping(dict(raw), "body")
        if body.get("generateContentRequest") is not None:
            body = mapping(body["generateContentRequest"], "generateContentRequest")
        if body.get("cachedContent") is not None:
            raise wrong("cachedContent", "there is no stored content here; send it as contents")
        config = mapping(body.get(_CONFIG), _CONFIG)
        notes: list[str] = []
        tools = read_tools(body.get("tools"), body.get("toolConfig"), notes)
        contents = read_contents(body.get("contents"), "contents")
        return ModelRequest(
            messages=[*read_system(body.get("systemInstruction"), "systemInstruction"), *contents],
            tools=tools.functions,
            tool_choice=tools.choice,
            forced_tool=tools.forced,
            json_schema=_answer_schema(config),
            sampling=_sampling(config),
            num_choices=integer(config.get("candidateCount"), f"{_CONFIG}.candidateCount", low=1) or 1,
            stream=self._form is not None,
            wants_logprobs=_wants_logprobs(config),
            notes=notes,
            raw=raw,
        )

    def reply(self, request: ModelRequest, reply: ModelReply) -> JsonObject:
        return response_body(reply)

    def stream(self, request: ModelRequest, head: ReplyHead) -> GeminiStream:
        return GeminiStream(head, self._form or "sse")

    def error(self, error: ManegeError) -> JsonObject:
        return error_body(error)

    def token_count(self, num_prompt: int) -> JsonObject:
        return {"totalTokens": num_prompt}

    def models(self, models: Sequence[ServedModel]) -> JsonObject:
        return {"models": [self.model(model) for model in models]}

    def model(self, model: ServedModel) -> JsonObject:
        return {
            "name": f"models/{model.id}",
            "displayName": model.id,
            "inputTokenLimit": model.context_limit,
            "outputTokenLimit": model.context_limit,
            "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
        }


def _sampling(config: JsonObject) -> AskedSampling:
    penalties = {name: number(config.get(key), f"{_CONFIG}.{key}", low=-2, high=2) for key, name in _PENALTIES.items()}
    return AskedSampling(
        temperature=number(config.get("temperature"), f"{_CONFIG}.temperature", low=0, high=2),
        top_p=number(config.get("topP"), f"{_CONFIG}.topP", low=0, high=1),
        top_k=integer(config.get("topK"), f"{_CONFIG}.topK", low=0),
        seed=integer(config.get("seed"), f"{_CONFIG}.seed", low=-(2**63)),
        stop=texts(config.get("stopSequences"), f"{_CONFIG}.stopSequences"),
        max_new_tokens=integer(config.get("maxOutputTokens"), f"{_CONFIG}.maxOutputTokens", low=1),
        others={name: value for name, value in penalties.items() if value},
    )


def _wants_logprobs(config: JsonObject) -> bool:
    if (integer(config.get("logprobs"), f"{_CONFIG}.logprobs", low=0) or 0) > 1:
        problem = "only the sampled token's log-probability is known; send responseLogprobs alone"
        raise wrong(f"{_CONFIG}.logprobs", problem)
    return flag(config.get("responseLogprobs"), f"{_CONFIG}.responseLogprobs")


def _answer_schema(config: JsonObject) -> JsonObject | None:
    for index, modality in enumerate(texts(config.get("responseModalities"), f"{_CONFIG}.responseModalities")):
        if modality.upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise wrong(f"{_CONFIG}.responseModalities[{index}]", f"is {shown(modality)}; this model answers text only")
    kind = text(config.get("responseMimeType") or "text/plain", f"{_CONFIG}.responseMimeType")
    if kind not in ("text/plain", "application/json"):
        raise wrong(f"{_CONFIG}.responseMimeType", f"is {shown(kind)}; want text/plain or application/json")
    for key in ("responseJsonSchema", "_responseJsonSchema"):
        if config.get(key) is not None:
            mapping(config[key], f"{_CONFIG}.{key}")
            return config[key]
    if config.get("responseSchema") is not None:
        return json_schema(config["responseSchema"], f"{_CONFIG}.responseSchema")
    return {} if kind == "application/json" else None
