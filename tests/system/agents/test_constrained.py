"""Tool choice and structured output in every protocol's spelling, enforced on a model that knows nothing of either."""

import json
import shutil

import jsonschema_rs
import pytest
import torch
from google.genai import types as genai_types
from transformers import LlamaConfig, LlamaForCausalLM

from manege.config import EngineConfig
from manege.engine.local import LocalEngine
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.ledger import Reason
from manege.trainer.algo.samples import build_samples
from tests.system.agents.asking import ask, calls_of, user

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
OTHER = {"type": "function", "function": {"name": "stop", "parameters": NOTHING}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
BOTH = [{"name": tool["function"]["name"], "schema": tool["function"]["parameters"]} for tool in (TOOL, OTHER)]
RESPONSES_TOOLS = [{"type": "function", "name": t["name"], "parameters": t["schema"], "strict": False} for t in BOTH]
CLAUDE_TOOLS = [{"name": tool["name"], "input_schema": tool["schema"]} for tool in BOTH]
GEMINI_TOOLS = [{"functionDeclarations": [{"name": t["name"], "parametersJsonSchema": t["schema"]} for t in BOTH]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """SmolLM2's tokenizer and template, over a small model that has learnt nothing."""
    known, made = open_folder("smollm2"), tmp_path_factory.mktemp("model")
    for file in known.path.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, made)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    changes = {**sizes, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096}
    config = {**known.config, **changes}
    (made / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(made)
    return open_folder(str(made))


@pytest.fixture
async def engine(folder):
    made = LocalEngine(load_model(folder, "cpu"), folder, config=EngineConfig(), seed=0)
    yield made
    await made.close()


async def check_excluded(store):
    """What was forced is never trained."""
    calls = await calls_of(store)
    assert calls
    assert all(call.constrained for call in calls)
    samples, ledger = build_samples(build_forest(calls))
    assert samples == []
    assert ledger.tokens[Reason.CONSTRAINED] == ledger.sampled > 0


def arguments_of(name, arguments):
    assert name in ("weather", "stop")
    if name == "weather":
        jsonschema_rs.validate(SCHEMA, arguments)
    return name


async def by_chat(agent, named):
    choice = {"type": "function", "function": {"name": "weather"}} if named else "required"
    answer = await ask(agent, [user("Hi")], tools=[TOOL, OTHER], tool_choice=choice, parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    return arguments_of(call.function.name, json.loads(call.function.arguments))


async def by_chat_stream(agent, named):
    choice = {"type": "function", "function": {"name": "weather"}} if named else "required"
    stream = await ask(
        agent, [user("Hi")], tools=[TOOL, OTHER], tool_choice=choice, parallel_tool_calls=False, stream=True
    )
    parts = [
        call.function async for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()
    ]
    name = "".join(part.name or "" for part in parts)
    return arguments_of(name, json.loads("".join(part.arguments or "" for part in parts)))


async def by_responses(agent, named):
    choice = {"type": "function", "name": "weather"} if named else "required"
    answer = await agent.responses.create(
        model="m", input="Hi", tools=RESPONSES_TOOLS, tool_choice=choice, parallel_tool_calls=False
    )
    [call] = answer.output
    return arguments_of(call.name, json.loads(call.arguments))


@pytest.mark.parametrize("by", [by_chat, by_chat_stream, by_responses])
async def test_required_and_named_tool_calls_of_openai(agent, store, by):
    assert {await by(agent, named=True) for _ in range(3)} == {"weather"}
    for _ in range(3):
        await by(agent, named=False)
    await check_excluded(store)


async def test_required_and_named_tool_calls_of_claude(claude, store):
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}):
        answer = await claude.messages.create(
            model="m",
            max_tokens=400,
            messages=[user("Hi")],
            tools=CLAUDE_TOOLS,
            tool_choice={**choice, "disable_parallel_tool_use": True},
        )
        assert answer.stop_reason == "tool_use"
        [call] = answer.content
        arguments_of(call.name, call.input)
    await check_excluded(store)


async def test_required_and_named_tool_calls_of_gemini(gemini, store):
    for names in (["weather"], None):
        config = genai_types.GenerateContentConfig(
            tools=GEMINI_TOOLS,
            tool_config={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": names}},
        )
        answer = await gemini.aio.models.generate_content(model="m", contents="Hi", config=config)
        call = answer.function_calls[0]
        arguments_of(call.name, call.args)
    await check_excluded(store)


async def test_structured_output_in_all_spellings(agent, claude, gemini, store):
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
    chat = await ask(agent, [user("Hi")], response_format=form)
    text_form = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}}
    response = await agent.responses.create(model="m", input="Hi", text=text_form)
    message = await claude.messages.create(
        model="m",
        max_tokens=400,
        messages=[user("Hi")],
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    )
    config = genai_types.GenerateContentConfig(response_mime_type="application/json", response_json_schema=SCHEMA)
    content = await gemini.aio.models.generate_content(model="m", contents="Hi", config=config)
    texts = [chat.choices[0].message.content, response.output_text, message.content[0].text, content.text]
    for text in texts:
        jsonschema_rs.validate(SCHEMA, json.loads(text))
    await check_excluded(store)


async def test_schema_that_cannot_be_enforced_is_refused(http):
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"type": "what"}}}
    answer = await http.post("/v1/chat/completions", json={"messages": [user("Hi")], "response_format": form})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_tool_choice_none_keeps_calls_as_text(agent, store):
    answer = await ask(agent, [user("Hi")], tools=[TOOL], tool_choice="none", max_tokens=20)
    assert answer.choices[0].message.tool_calls is None
    [call] = await calls_of(store)
    assert (call.constrained, "tools" in call.request) == (False, True)


async def test_with_tools_an_answer_is_json_or_a_call(agent, store):
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
    for _ in range(4):
        answer = await ask(agent, [user("Hi")], tools=[OTHER], response_format=form, parallel_tool_calls=False)
        message = answer.choices[0].message
        if message.tool_calls:
            assert [call.function.name for call in message.tool_calls] == ["stop"]
        else:
            jsonschema_rs.validate(SCHEMA, json.loads(message.content))
    await check_excluded(store)
