"""The Gemini API: bodies to canonical requests, answers to bodies, event streams and growing arrays."""

import base64
import json

import httpx
import orjson
import pytest
from google import genai
from google.genai import errors, types
from hypothesis import given, settings
from hypothesis import strategies as st

from manege.errors import ContextOverflowError, EngineError, ForbiddenError, NotFoundError, UnavailableError
from manege.protocols.base import InvalidRequest, ModelRequest, ReplyDelta, ServedModel, TokenLogprob
from manege.protocols.gemini import Gemini
from manege.types import FinishReason
from tests.random_answers import any_json, cuts, json_objects, meaning, messages, reply_of
from tests.stream_rules_messages import check_gemini_stream, sse_events

PROTOCOL = Gemini()
USER = {"role": "user", "parts": [{"text": "Hi"}]}
REQUEST = PROTOCOL.parse({"contents": [USER]})
BLOB = {"mimeType": "image/png", "data": "aGk="}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
SIGNATURE = base64.b64encode(b"ab12").decode()


def parse(**body):
    return PROTOCOL.parse(json.loads(json.dumps({"contents": [USER], **body})))


def config(**fields):
    return parse(generationConfig=fields)


def contents(*found):
    return parse(contents=list(found)).messages


def model(*parts):
    return {"role": "model", "parts": list(parts)}


def user(*parts):
    return {"role": "user", "parts": list(parts)}


def call(arguments, call_id="call_ab", name="bash"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def stream(reply, deltas=(), form="sse"):
    written = Gemini(stream=form).stream(REQUEST, reply.head)
    body = [written.start(), written.heartbeat()]
    for index, delta in deltas:
        body += [written.delta(index, delta), written.heartbeat()]
    return b"".join([*body, written.finish(reply)])


def streamed_objects(body, form="sse"):
    return json.loads(body) if form == "array" else [data for _, data in sse_events(body)]


def test_a_conversation_becomes_canonical_in_both_spellings():
    camel = {
        "systemInstruction": {"parts": [{"text": "You"}, {"text": "are"}]},
        "contents": [
            user({"text": "a"}, {"text": "b"}),
            model(
                {"text": "Hm.", "thought": True},
                {"text": "Look:"},
                {"functionCall": {"id": "x1", "name": "bash", "args": {"c_d": "ls"}}, "thoughtSignature": "eA=="},
            ),
            user({"functionResponse": {"id": "x1", "name": "bash", "response": {"out_put": "ü"}}}, {"text": "go on"}),
        ],
    }
    snake = json.loads(
        json.dumps(camel)
        .replace("systemInstruction", "system_instruction")
        .replace("functionCall", "function_call")
        .replace("functionResponse", "function_response")
        .replace("thoughtSignature", "thought_signature")
    )
    for body in (camel, snake, {"generateContentRequest": camel}):
        assert parse(**{"contents": None, **body}).messages == [
            {"role": "system", "content": "You\nare"},
            {"role": "user", "content": "a\nb"},
            {
                "role": "assistant",
                "content": "Look:",
                "reasoning_content": "Hm.",
                "tool_calls": [call('{"c_d":"ls"}', "x1")],
            },
            {"role": "tool", "tool_call_id": "x1", "content": '{"out_put":"ü"}'},
            {"role": "user", "content": "go on"},
        ]


@pytest.mark.parametrize(
    "value", ["S", {"text": "S"}, {"role": "user", "parts": [{"text": "S"}]}, ["S"], [{"text": "S"}]]
)
def test_a_system_instruction_in_any_shape(value):
    assert parse(systemInstruction=value).messages[0] == {"role": "system", "content": "S"}


def test_responses_without_ids_answer_the_calls_before_them_by_name_and_order():
    first = [{"functionCall": {"name": name, "args": {"n": n}}} for n, name in enumerate(["a", "b", "a"])]
    results = [
        {"functionResponse": {"name": name, "response": {"of": of}}} for name, of in [("b", 1), ("a", 0), ("a", 2)]
    ]
    history = contents(USER, model(*first), {"role": "function", "parts": results}, model(first[0]))
    ids = [made["id"] for made in history[1]["tool_calls"]]
    assert len({*ids, history[-1]["tool_calls"][0]["id"]}) == 4
    assert [(told["tool_call_id"], told["content"]) for told in history[2:5]] == [
        (ids[1], '{"of":1}'), (ids[0], '{"of":0}'), (ids[2], '{"of":2}'),
    ]  # fmt: skip
    # The same history read again, with more behind it, has the same ids.
    assert contents(USER, model(*first), user(*results), USER)[:5] == history[:5]


def test_a_response_with_an_id_of_the_clients_own_answers_the_call_of_its_name():
    answered = {"functionResponse": {"id": "own-1", "name": "a", "response": {}}}
    history = contents(USER, model({"functionCall": {"name": "a"}}), user(answered))
    assert history[2]["tool_call_id"] == history[1]["tool_calls"][0]["id"]
    assert contents(USER, user(answered))[1]["tool_call_id"] == "own-1"


def test_model_contents_in_a_row_are_one_message():
    pieces = [model({"text": "a", "thought": True}), model({"text": "b"}), model({"text": "c"}), model({"text": ""})]
    assert contents(USER, *pieces, USER)[1] == {"role": "assistant", "content": "bc", "reasoning_content": "a"}


def test_images_stay_parts():
    file = {"fileData": {"mimeType": "image/png", "fileUri": "https://x/y.png"}}
    assert contents(user({"text": "see"}, {"inlineData": BLOB}, file))[0]["content"] == [
        {"type": "text", "text": "see"},
        PNG_PART,
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
    ]
    response = {"id": "x", "name": "shot", "response": {"ok": True}, "parts": [{"inlineData": BLOB}]}
    assert contents(user({"functionResponse": response}))[0]["content"] == [
        {"type": "text", "text": '{"ok":true}'},
        PNG_PART,
    ]


def test_settings_are_read_and_the_rest_stays_in_raw():
    request = config(
        temperature=1, topP=0.9, topK=40.0, maxOutputTokens=9, stopSequences=["END"], candidateCount=2, seed=3,
        presencePenalty=0.5, frequencyPenalty=0, responseLogprobs=True, logprobs=1,
        thinkingConfig={"thinkingBudget": 0},
    )  # fmt: skip
    asked = request.sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_new_tokens, asked.seed) == (1.0, 0.9, 40, 9, 3)
    assert (asked.stop, asked.others) == (["END"], {"presence_penalty": 0.5})
    assert (request.num_choices, request.wants_logprobs, request.stream) == (2, True, False)
    assert request.raw["generationConfig"]["thinkingConfig"] == {"thinkingBudget": 0}
    assert parse(generation_config={"top_k": 4, "max_output_tokens": 5}).sampling.top_k == 4
    plain = REQUEST.sampling
    assert (plain.temperature, plain.top_p, plain.top_k, plain.max_new_tokens, plain.seed) == (None,) * 5
    assert Gemini(stream="sse").parse({"contents": [USER]}).stream
    assert Gemini(stream="array").parse({"contents": [USER]}).stream


def test_a_gemini_schema_becomes_json_schema():
    schema = {
        "type": "OBJECT",
        "properties": {
            "any_of": {"type": "STRING", "nullable": True, "enum": ["a", "b"], "example": "a"},
            "list": {"type": "ARRAY", "items": {"type": "INTEGER"}, "min_items": "2", "maxItems": 3},
            "choice": {"any_of": [{"type": "NUMBER"}, {"ref": "#/defs/x"}], "nullable": True},
        },
        "required": ["list"],
        "propertyOrdering": ["list"],
        "additional_properties": False,
        "defs": {"x": {"type": "TYPE_UNSPECIFIED", "description": "d"}},
    }
    expected = {
        "type": "object",
        "properties": {
            "any_of": {"type": ["string", "null"], "enum": ["a", "b", None]},
            "list": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
            "choice": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/x"}, {"type": "null"}]},
        },
        "required": ["list"],
        "additionalProperties": False,
        "$defs": {"x": {"description": "d"}},
    }
    assert config(responseMimeType="application/json", responseSchema=schema).json_schema == expected
    declared = {"name": "f", "description": "D", "parameters": schema, "behavior": "BLOCKING"}
    plain = {"name": "g", "parametersJsonSchema": {"type": "object", "properties": {"snake_case": {}}}}
    request = parse(tools=[{"functionDeclarations": [declared, plain]}, {"googleSearch": {}, "codeExecution": {}}])
    assert request.tools == [
        {"type": "function", "function": {"name": "f", "description": "D", "parameters": expected}},
        {"type": "function", "function": {"name": "g", "parameters": plain["parametersJsonSchema"]}},
    ]
    assert len(request.notes) == 2
    assert all(note.startswith("tools[1]") for note in request.notes)


def test_structured_output_in_its_spellings():
    assert config(responseMimeType="application/json").json_schema == {}
    assert config(responseMimeType="text/plain").json_schema is None
    schema = {"type": "object", "properties": {"snake_case": {"type": "string"}}}
    for key in ("responseJsonSchema", "response_json_schema", "_responseJsonSchema"):
        assert config(**{"responseMimeType": "application/json", key: schema}).json_schema == schema


@pytest.mark.parametrize(
    ("calling", "choice", "forced", "offered"),
    [
        (None, "auto", None, "abc"),
        ({"mode": "AUTO"}, "auto", None, "abc"),
        ({"mode": "VALIDATED"}, "auto", None, "abc"),
        ({"mode": "NONE"}, "none", None, "abc"),
        ({"mode": "any"}, "required", None, "abc"),
        ({"mode": "ANY", "allowedFunctionNames": ["b"]}, "required", "b", "abc"),
        ({"mode": "ANY", "allowed_function_names": ["c", "a"]}, "required", None, "ac"),
    ],
)
def test_function_calling_modes(calling, choice, forced, offered):
    tools = [{"functionDeclarations": [{"name": name} for name in "abc"]}]
    request = parse(tools=tools, toolConfig={"functionCallingConfig": calling})
    assert (request.tool_choice, request.forced_tool) == (choice, forced)
    assert "".join(tool["function"]["name"] for tool in request.tools) == offered
    assert len(request.notes) == (offered != "abc")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"contents": []}, "contents"),
        ({"contents": "Hi"}, "contents"),
        ({"contents": ["Hi"]}, "contents[0]"),
        ({"contents": [{"role": "robot", "parts": []}]}, "contents[0].role"),
        ({"contents": [user({"text": 5})]}, "contents[0].parts[0].text"),
        ({"contents": [user({"text": "a", "inlineData": BLOB})]}, "contents[0].parts[0]"),
        ({"contents": [user({"inlineData": {"mimeType": "audio/wav", "data": ""}})]},
         "contents[0].parts[0].inlineData"),
        ({"contents": [user({"fileData": {"mimeType": "video/mp4", "fileUri": "x"}})]},
         "contents[0].parts[0].fileData"),
        ({"contents": [model({"executableCode": {}})]}, "contents[0].parts[0]"),
        ({"contents": [user({"functionResponse": {"name": "a", "response": {}}})]},
         "contents[0].parts[0].functionResponse"),
        ({"contents": [user({"functionResponse": {"id": "a", "response": "x"}})]},
         "contents[0].parts[0].functionResponse.response"),
        ({"contents": [model({"functionCall": {}})]}, "contents[0].parts[0].functionCall.name"),
        ({"systemInstruction": {"parts": [{"inlineData": BLOB}]}}, "systemInstruction.parts[0].text"),
        ({"contents": [model({"functionCall": {"name": "a", "args": {"n": 2**70}}})]},
         "contents[0].parts[0].functionCall.args"),
        ({"cachedContent": "x"}, "cachedContent"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"tools": 5}, "tools"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "MAYBE"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["a", "b"]}}},
         "toolConfig.functionCallingConfig.allowedFunctionNames"),
        ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
        ({"generationConfig": {"topK": 1.5}}, "generationConfig.topK"),
        ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"logprobs": 5}}, "generationConfig.logprobs"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "generationConfig.responseModalities[0]"),
        ({"generationConfig": {"responseSchema": {"properties": 5}}}, "generationConfig.responseSchema.properties"),
        ({"generationConfig": {"responseSchema": {"minItems": "9" * 5000}}},
         "generationConfig.responseSchema.minItems"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(body, param):
    with pytest.raises(InvalidRequest) as caught:
        parse(**body)
    assert caught.value.param == param


_words = st.text(max_size=5)
_call = st.fixed_dictionaries(
    {}, optional={"name": _words | any_json, "id": _words | any_json, "args": json_objects | any_json,
                  "response": json_objects | any_json, "parts": any_json}
)  # fmt: skip
_part = st.fixed_dictionaries(
    {},
    optional={"thought": any_json, "thoughtSignature": any_json, "text": _words | any_json, "functionCall": _call,
              "function_response": _call | any_json, "inlineData": any_json, "fileData": any_json},
)  # fmt: skip
_content = st.fixed_dictionaries(
    {"parts": st.lists(_part | any_json, max_size=4) | any_json},
    optional={"role": st.sampled_from(["user", "model", "function"]) | any_json},
)
_schema = st.recursive(
    any_json,
    lambda inner: st.fixed_dictionaries(
        {}, optional={"type": any_json, "properties": st.dictionaries(_words, inner, max_size=2), "items": inner,
                      "anyOf": st.lists(inner, max_size=2), "nullable": any_json, "enum": any_json,
                      "minItems": any_json}
    ),
    max_leaves=5,
)  # fmt: skip
_SETTINGS = ("temperature", "topK", "seed", "stopSequences", "candidateCount", "responseMimeType", "responseLogprobs",
             "logprobs", "presencePenalty", "responseModalities")  # fmt: skip
_generation = st.fixed_dictionaries(
    {}, optional={"responseSchema": _schema, **dict.fromkeys(_SETTINGS, any_json)}
)  # fmt: skip
_tool = st.fixed_dictionaries(
    {}, optional={"functionDeclarations": st.lists(
        st.fixed_dictionaries({"name": _words}, optional={"parameters": _schema, "parametersJsonSchema": any_json}),
        max_size=2) | any_json, "googleSearch": any_json}
)  # fmt: skip
_body = st.fixed_dictionaries(
    {"contents": st.lists(_content | any_json, max_size=4) | any_json},
    optional={
        "systemInstruction": any_json | _content,
        "tools": st.lists(_tool | any_json, max_size=2) | any_json,
        "toolConfig": any_json | st.fixed_dictionaries({"functionCallingConfig": st.fixed_dictionaries(
            {"mode": st.sampled_from(["ANY", "AUTO"]) | any_json}, optional={"allowedFunctionNames": any_json})}),
        "generationConfig": _generation | any_json,
        "cachedContent": any_json,
    },
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(body=_body | st.fixed_dictionaries({"generateContentRequest": _body | any_json}))
def test_any_body_is_read_or_refused(body):
    try:
        request = PROTOCOL.parse(body)
    except InvalidRequest as refused:
        PROTOCOL.error(refused)
        return
    assert isinstance(request, ModelRequest)
    for message in request.messages:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str) or request.has_images
        assert orjson.dumps(message)


@pytest.mark.parametrize("key", ["contents", "systemInstruction", "tools", "toolConfig", "generationConfig"])
def test_a_deep_body_is_refused_or_passed_over(key):
    value = {"type": "OBJECT"}
    for _ in range(900):
        value = {"items": value, "parts": [value], "responseSchema": value, "functionDeclarations": value}
    try:
        PROTOCOL.parse({"contents": [USER], key: value})
    except InvalidRequest:
        pass


@pytest.mark.parametrize("form", ["sse", "array"])
@settings(max_examples=100, deadline=None)
@given(message=messages(), data=st.data())
def test_an_answer_echoed_by_a_client_is_the_same_message_however_it_was_cut(form, message, data):
    reply = reply_of(message)
    body = PROTOCOL.reply(REQUEST, reply)
    assert orjson.loads(orjson.dumps(body)) == body
    plain = types.GenerateContentResponse.model_validate(body)
    deltas = [(0, delta) for delta in data.draw(cuts(message))]
    objects = streamed_objects(stream(reply, deltas, form), form)
    streamed = types.GenerateContentResponse.model_validate(check_gemini_stream(objects))
    kept_as_they_came = [types.GenerateContentResponse.model_validate(item) for item in objects]
    for answers in ([plain], [streamed], kept_as_they_came):
        echo = [answer.candidates[0].content.model_dump(mode="json", exclude_none=True) for answer in answers]
        assert meaning(contents(USER, *echo)[1]) == meaning(message)
    assert streamed.usage_metadata == plain.usage_metadata
    assert streamed.candidates[0].finish_reason == plain.candidates[0].finish_reason


def test_the_body_of_an_answer():
    message = {"role": "assistant", "content": "Look:", "reasoning_content": "Hm.", "tool_calls": [call('{"c": 1}')]}
    logprobs = [TokenLogprob(text="Look", logprob=-0.5)]
    cut = reply_of(message, finish_reason=FinishReason.LENGTH, logprobs=logprobs)
    assert PROTOCOL.reply(REQUEST, cut) == {
        "candidates": [
            {
                "index": 0,
                "content": {
                    "role": "model",
                    "parts": [
                        {"text": "Hm.", "thought": True},
                        {"text": "Look:"},
                        {
                            "functionCall": {"id": "call_ab", "name": "bash", "args": {"c": 1}},
                            "thoughtSignature": SIGNATURE,
                        },
                    ],
                },
                "logprobsResult": {"chosenCandidates": [{"token": "Look", "logProbability": -0.5}]},
                "finishReason": "MAX_TOKENS",
            }
        ],
        "modelVersion": "m",
        "responseId": "ab12",
        "usageMetadata": {
            "promptTokenCount": 100,
            "candidatesTokenCount": 7,
            "totalTokenCount": 107,
            "cachedContentTokenCount": 60,
        },
    }


@pytest.mark.parametrize("form", ["sse", "array"])
def test_two_candidates_stream_side_by_side(form):
    told = [{"role": "assistant", "content": text} for text in ("ab", "cd")]
    logprobs = [TokenLogprob(text="a", logprob=-0.5)]
    deltas = [(1, ReplyDelta(content="c")), (0, ReplyDelta(logprobs=logprobs)), (0, ReplyDelta(content="ab")),
              (1, ReplyDelta()), (1, ReplyDelta(content="d"))]  # fmt: skip
    found = check_gemini_stream(streamed_objects(stream(reply_of(*told), deltas, form), form))
    assert [candidate["content"]["parts"] for candidate in found["candidates"]] == [[{"text": "ab"}], [{"text": "cd"}]]
    assert found["candidates"][0]["logprobsResult"]["chosenCandidates"] == [{"token": "a", "logProbability": -0.5}]
    assert found["usageMetadata"]["candidatesTokenCount"] == 14


def client(answers, seen):
    """The official client over a transport that answers with the bodies in turn."""

    def answer(request):
        seen.append(json.loads(request.content))
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=answers[len(seen) - 1])

    options = types.HttpOptions(
        base_url="http://test", httpx_client=httpx.Client(transport=httpx.MockTransport(answer))
    )
    return genai.Client(api_key="k", http_options=options)


def test_a_streamed_chat_of_the_official_client_comes_back_as_the_same_messages():
    message = {"role": "assistant", "content": "Look:", "tool_calls": [call('{"c":1}')]}
    pieces = [ReplyDelta(content="Lo"), ReplyDelta(content="ok:"), ReplyDelta(tool_calls=message["tool_calls"])]
    last = reply_of({"role": "assistant", "content": "Done."})
    seen = []
    answers = [
        stream(reply_of(message), [(0, piece) for piece in pieces]),
        stream(last, [(0, ReplyDelta(content="Done."))]),
        stream(last, [(0, ReplyDelta(content="Done."))]),
    ]
    chat = client(answers, seen).chats.create(model="m")
    texts = [part.text for piece in chat.send_message_stream("Hi") for part in piece.candidates[0].content.parts]
    assert "".join(filter(None, texts)) == "Look:"
    response = types.Part.from_function_response(name="bash", response={"output": "x"})
    list(chat.send_message_stream(response))
    list(chat.send_message_stream("More"))
    assert PROTOCOL.parse(seen[2]).messages == [
        {"role": "user", "content": "Hi"},
        message,
        {"role": "tool", "tool_call_id": "call_ab", "content": '{"output":"x"}'},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "More"},
    ]


def test_the_official_clients_settings_and_tools_are_read():
    def bash(command: str, timeout_s: int = 5) -> str:
        """Run it."""
        return command

    seen = []
    answer = json.dumps(PROTOCOL.reply(REQUEST, reply_of({"role": "assistant", "content": "x"}))).encode()
    asked = types.GenerateContentConfig(
        system_instruction="Be", tools=[bash], temperature=0.5, top_k=3, response_logprobs=True,
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        tool_config=types.ToolConfig(function_calling_config=types.FunctionCallingConfig(
            mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["bash"])),
    )  # fmt: skip
    client([answer], seen).models.generate_content(model="m", contents="Hi", config=asked)
    request = PROTOCOL.parse(seen[0])
    assert request.messages == [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]
    assert (request.tool_choice, request.forced_tool, request.wants_logprobs) == ("required", "bash", True)
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 3)
    parameters = request.tools[0]["function"]["parameters"]
    assert parameters["type"] == "object"
    assert parameters["properties"]["command"]["type"] == "string"


def test_an_error_in_a_stream_reaches_the_official_client():
    written = Gemini(stream="sse").stream(REQUEST, reply_of({"role": "assistant", "content": ""}).head)
    body = written.delta(0, ReplyDelta(content="a")) + written.error(UnavailableError("paused; try again"))
    with pytest.raises(errors.ServerError, match="paused"):
        list(client([body], []).models.generate_content_stream(model="m", contents="Hi"))
    written = Gemini(stream="array").stream(REQUEST, reply_of({"role": "assistant", "content": ""}).head)
    body = written.start() + written.heartbeat() + written.error(UnavailableError("paused"))
    assert json.loads(body)[0]["error"]["status"] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (InvalidRequest("x", param="contents"), 400, "INVALID_ARGUMENT"),
        (ForbiddenError("x"), 403, "PERMISSION_DENIED"),
        (NotFoundError("x"), 404, "NOT_FOUND"),
        (UnavailableError("x"), 503, "UNAVAILABLE"),
        (EngineError("x"), 502, "INTERNAL"),
    ],
)
def test_errors_have_the_status_of_their_code(error, code, status):
    assert PROTOCOL.error(error) == {"error": {"code": code, "message": "x", "status": status}}


def test_an_overflow_names_both_numbers_where_they_are_known():
    error = ContextOverflowError("too long")
    assert PROTOCOL.error(error)["error"]["message"] == "too long"
    error.num_prompt, error.context_limit = 9, 8  # pyright: ignore
    assert "(9) exceeds" in PROTOCOL.error(error)["error"]["message"]


def test_token_counts_and_model_lists_are_the_official_types():
    assert types.CountTokensResponse.model_validate(PROTOCOL.token_count(5)).total_tokens == 5
    listed = PROTOCOL.models([ServedModel(id="a", context_limit=64)])
    assert [item["name"] for item in listed["models"]] == ["models/a"]
    assert listed["models"][0]["inputTokenLimit"] == 64
    assert "generateContent" in listed["models"][0]["supportedGenerationMethods"]
