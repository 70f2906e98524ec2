"""Renderers of several families on SmolLM2's vocabulary: a family's chat template, reduced to what matters, and its
special tokens."""

from functools import cache

from tokenizers import AddedToken, Tokenizer

from manege.model.folder import open_folder
from manege.rendering.generic import GenericRenderer
from manege.rendering.known import KnownRenderer

_CHATML = """{% if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_HERMES_CALL = """{% if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>"""
_XML_CALL = """
{% if message.content or not loop.first %}{{ "\\n" }}{% endif %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>"""
_LLAMA = """{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}{{ raise_exception("one call at once") }}{% endif %}
{% set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{% else %}{{ message.content }}{% endif -%}
<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}{% if false %}{{ tools }}{% endif %}"""

_TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
_GENERIC = {
    "hermes": (_CHATML.replace("CALL", _HERMES_CALL), _TAGS),
    "hermes as text": (_CHATML.replace("CALL", _HERMES_CALL), []),
    "xml": (_CHATML.replace("CALL", _XML_CALL), _TAGS),
    "llama": (_LLAMA, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]),
    "thinking": (
        _CHATML.replace("CALL", _HERMES_CALL).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
        _TAGS,
    ),
}
_KIMI_CALLS = [
    "tool_calls_section_begin",
    "tool_calls_section_end",
    "tool_call_begin",
    "tool_call_argument_begin",
    "tool_call_end",
]
_DEEPSEEK_CALLS = [
    f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "call", "outputs", "output") for end in ("begin", "end")
]
_RESULT = ["<tool_response>", "</tool_response>"]
_GLM = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *_TAGS, *_RESULT]
_GLM_CALLS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
KNOWN = {
    "Qwen/Qwen3-0.6B": [*_TAGS[1:], *_RESULT],
    "Qwen/Qwen3.5-4B": [*_TAGS, *_RESULT, *_VISION],
    "zai-org/GLM-5": [*_GLM, *_GLM_CALLS],
    "zai-org/GLM-4.5-Air": [*_GLM, *_GLM_CALLS],
    "deepseek-ai/DeepSeek-V3": [
        *["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"],
        *_DEEPSEEK_CALLS,
    ],
    "moonshotai/Kimi-K2-Instruct": [
        f"<|{token}|>" for token in ["im_user", "im_assistant", "im_system", "im_middle", *_KIMI_CALLS]
    ],
    "meta-llama/Llama-3.2-1B-Instruct": [
        f"<|{token}|>"
        for token in ["begin_of_text", "start_header_id", "end_header_id", "eot_id", "end_of_text", "eom_id"]
    ],
    "MiniMaxAI/MiniMax-M2": ["]~!b[", "]~b]", "[e~[", *_TAGS[:2], "<minimax:tool_call>", "</minimax:tool_call>"],
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": [*_TAGS, *_RESULT],
}
"""Special tokens of families of the library `renderers`, those that SmolLM2 has left out."""


@cache
def tokenizer_with(*tokens: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(open_folder("smollm2").tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return tokenizer


@cache
def generic(name: str) -> GenericRenderer:
    template, tokens = _GENERIC[name]
    return from_template(template, *tokens)


def from_template(template: str, *tokens: str) -> GenericRenderer:
    tokenizer = tokenizer_with(*tokens)
    return GenericRenderer(tokenizer, template, special_tokens={}, eos_ids=frozenset({2}))


@cache
def known(name: str) -> KnownRenderer:
    return KnownRenderer(tokenizer_with(*KNOWN[name]), name)
