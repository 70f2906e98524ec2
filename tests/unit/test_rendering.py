"""Renderers on real templates: SmolLM2's (plain ChatML without tools) and Qwen3's (tools, drops earlier reasoning)."""

import dataclasses
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from manege.errors import ModelError, ProtocolError
from manege.model.folder import ModelFolder, open_folder
from manege.rendering.generic import GenericRenderer
from manege.rendering.known import KnownRenderer
from manege.rendering.select import renderer_for
from tests.renderers import generic

QWEN3 = (Path(__file__).parent / "templates" / "qwen3.jinja").read_text(encoding="utf-8")
QWEN3_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN3_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **rest):
    return {"role": "assistant", "content": text, **rest}


def calling(name, arguments, text=""):
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return assistant(text, tool_calls=[call])


def tool(text):
    return {"role": "tool", "content": text, "tool_call_id": "call_1"}


@pytest.fixture(scope="module")
def smollm2_folder():
    return open_folder("smollm2")


@pytest.fixture(scope="module")
def smollm2(smollm2_folder):
    return renderer_for(smollm2_folder)


@pytest.fixture(scope="module")
def qwen3_folder(smollm2_folder, tmp_path_factory):
    """Qwen3's template and its special tokens on SmolLM2's vocabulary."""
    tokenizer = Tokenizer.from_str(smollm2_folder.tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in QWEN3_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in QWEN3_MARKS])
    return dataclasses.replace(smollm2_folder, name="qwen3-like", tokenizer=tokenizer, chat_template=QWEN3)


@pytest.fixture(scope="module")
def qwen3(qwen3_folder):
    return renderer_for(qwen3_folder)


def sampled(renderer, text, end="<|im_end|>"):
    return renderer.encode(text + end)


def show(folder: ModelFolder, ids):
    return folder.tokenizer.decode(list(ids), skip_special_tokens=False)


def test_render_gives_the_text_that_transformers_gives(smollm2_folder, smollm2):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=smollm2_folder.tokenizer, **smollm2_folder.special_tokens
    )
    reference.chat_template = smollm2_folder.chat_template
    messages = [user("Hi <b>&</b>"), assistant("Hello."), user("Ünïcode 12345\n\n  x")]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert smollm2.render(messages, ()) == expected


def test_default_system_prompt_of_the_template_is_kept_over_turns(smollm2_folder, smollm2):
    history = [user("Hi")]
    prompt, response = smollm2.render(history, ()), sampled(smollm2, "Hello.")
    new = [user("Go on")]
    added = smollm2.bridge([*history, assistant("Hello.")], prompt, response, new, ())
    assert show(smollm2_folder, prompt).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert show(smollm2_folder, added) == "\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"


def test_bridge_closes_an_answer_that_was_cut(smollm2_folder, smollm2):
    history = [user("Hi")]
    prompt, response = smollm2.render(history, ()), sampled(smollm2, "Hello, I", end="")
    added = smollm2.bridge([*history, assistant("Hello, I")], prompt, response, [user("Go on")], ())
    assert show(smollm2_folder, added) == "<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"


def test_bridge_after_an_answer_without_tokens(smollm2_folder, smollm2):
    prompt = smollm2.render([user("Hi")], ())
    added = smollm2.bridge([user("Hi"), assistant("")], prompt, [], [user("So?")], ())
    assert show(smollm2_folder, added).startswith("<|im_end|>\n<|im_start|>user\nSo?")


def test_bridge_does_not_depend_on_what_was_sampled(smollm2):
    """Ids that no tokenizer would give for their text stay; the bridge adds what is new, and only that."""
    prompt = smollm2.render([user("Hi")], ())
    one_by_one = [token for letter in "Hello." for token in smollm2.encode(letter)]
    assert one_by_one != smollm2.encode("Hello.")
    history, new = [user("Hi"), assistant("Hello.")], [user("Go on")]
    odd = smollm2.bridge(history, prompt, [*one_by_one, *smollm2.encode("<|im_end|>")], new, ())
    assert odd == smollm2.bridge(history, prompt, sampled(smollm2, "Hello."), new, ())


def test_tools_are_written_into_the_system_text_of_a_template_without_tools(smollm2_folder, smollm2):
    messages = [
        {"role": "system", "content": "Be brief."},
        user("List files"),
        calling("bash", '{"c": "ls"}', "Ok."),
        tool("a.txt"),
    ]
    text = show(smollm2_folder, smollm2.render(messages, [BASH]))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}\n</tools>' in text
    assert 'Ok.\n<tool_call>\n{"name": "bash", "arguments": {"c": "ls"}}\n</tool_call><|im_end|>' in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_turn_is_bridged_without_touching_the_sampled_call(smollm2_folder, smollm2):
    text = '<tool_call>\n{"name":"bash","arguments":{"c":"ls"}}\n</tool_call>'
    prompt, response = smollm2.render([user("List files")], [BASH]), sampled(smollm2, text)
    history = [user("List files"), calling("bash", '{"c": "ls"}')]
    added = smollm2.bridge(history, prompt, response, [tool("a.txt"), tool("b.txt")], [BASH])
    assert show(smollm2_folder, added) == (
        "\n<|im_start|>user\n<tool_response>\na.txt\n</tool_response>\n<tool_response>\nb.txt\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("answer", [calling("bash", '{"c": "ls"}'), calling("bash", "not json", "Ok.")])
def test_qwen3_keeps_reasoning_within_a_tool_turn(qwen3_folder, qwen3, answer):
    answer = {**answer, "reasoning_content": "Let me look."}
    prompt = qwen3.render([user("List files")], [BASH])
    response = sampled(qwen3, "<think>\nLet me look.\n</think>\n\n<tool_call>...</tool_call>")
    added = qwen3.bridge([user("List files"), answer], prompt, response, [tool("a.txt")], [BASH])
    assert show(qwen3_folder, added) == (
        "\n<|im_start|>user\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwen3_has_no_bridge_where_it_drops_reasoning(qwen3):
    prompt = qwen3.render([user("Hi")], ())
    response = sampled(qwen3, "<think>\nA greeting.\n</think>\n\nHello.")
    answer = assistant("Hello.", reasoning_content="A greeting.")
    assert qwen3.bridge([user("Hi"), answer], prompt, response, [user("Go on")], ()) is None


def test_qwen3_has_no_bridge_where_it_drops_reasoning_of_an_earlier_turn(qwen3):
    history = [user("Hi"), {**calling("bash", "{}"), "reasoning_content": "Look."}, tool("a.txt")]
    prompt, response = qwen3.render(history, [BASH]), sampled(qwen3, "Done.")
    assert qwen3.bridge([*history, assistant("Done.")], prompt, response, [user("Go on")], [BASH]) is None


def test_qwen3_bridges_an_answer_without_reasoning(qwen3):
    prompt, response = qwen3.render([user("Hi")], ()), sampled(qwen3, "Hello.")
    history, new = [user("Hi"), assistant("Hello.")], [user("Go on")]
    added = qwen3.bridge(history, prompt, response, new, ())
    assert [*prompt, *response, *added] == qwen3.render([*history, *new], ())


def test_known_model_is_rendered_by_the_library_as_by_its_template(qwen3_folder, qwen3):
    known = renderer_for(dataclasses.replace(qwen3_folder, name="Qwen/Qwen3-0.6B"))
    assert isinstance(known, KnownRenderer)
    messages = [{"role": "system", "content": "Be brief."}, user("List"), calling("bash", '{"c": "ls"}'), tool("a.txt")]
    prompt = known.render(messages, [BASH])
    assert prompt == qwen3.render(messages, [BASH])
    response = sampled(known, "Done.")
    history, new = [*messages, assistant("Done.")], [tool("b.txt")]
    assert known.bridge(history, prompt, response, new, [BASH]) == qwen3.bridge(history, prompt, response, new, [BASH])
    assert known.bridge(history, prompt, response, [user("Go on")], [BASH]) is None
    assert known.stop_ids == qwen3.stop_ids | {known.encode("<|endoftext|>")[0]}


def test_model_that_the_library_cannot_open_is_rendered_by_its_template(smollm2_folder):
    folder = dataclasses.replace(smollm2_folder, name="moonshotai/Kimi-K2-Instruct")
    assert isinstance(renderer_for(folder), GenericRenderer)


def test_template_wins_over_a_known_name(smollm2_folder, qwen3_folder):
    folder = dataclasses.replace(qwen3_folder, name="Qwen/Qwen3-0.6B", chat_template=smollm2_folder.chat_template)
    assert isinstance(renderer_for(folder), GenericRenderer)


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("Hello.", "Hello.", None, []),
        ("<think>\nHm.\n</think>\n\nHello.", "Hello.", "Hm.", []),
        ("Hm.\n</think>\n\nHello.", "Hm.\n</think>\n\nHello.", None, []),
        ("<think>\nHm.", "", "Hm.", []),
        (
            'Ok.\n<tool_call>\n{"name": "bash", "arguments": {"c": "ls"}}\n</tool_call>',
            "Ok.",
            None,
            [("bash", '{"c": "ls"}')],
        ),
        (
            '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
            "",
            None,
            [("a", "{}"), ("b", "{}")],
        ),
        ('<tool_call>\n{"name": "bash", "arg', '<tool_call>\n{"name": "bash", "arg', None, []),
        ('<tool_call>\n{"name": "bash"}', '<tool_call>\n{"name": "bash"}', None, []),
        ("<tool_call>ls</tool_call>", "<tool_call>ls</tool_call>", None, []),
        ('<tool_call>["bash"]</tool_call>', '<tool_call>["bash"]</tool_call>', None, []),
    ],
)
@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_parse(request, name, text, content, reasoning, calls):
    renderer = request.getfixturevalue(name)
    parsed = renderer.parse(sampled(renderer, text), tools=[BASH])
    assert (parsed.content, parsed.reasoning) == (content, reasoning)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls


def test_text_is_content_when_there_are_no_tools(smollm2):
    text = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
    assert smollm2.parse(sampled(smollm2, text)).content == text


def test_known_parser_gives_reasoning_and_calls(qwen3_folder):
    known = renderer_for(dataclasses.replace(qwen3_folder, name="Qwen/Qwen3-0.6B"))
    text = '<think>\nHm.\n</think>\n\nOk.\n<tool_call>\n{"name": "bash", "arguments": {"c": "ls"}}\n</tool_call>'
    parsed = known.parse(sampled(known, text), tools=[BASH])
    assert (parsed.content, parsed.reasoning) == ("Ok.", "Hm.")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("bash", '{"c": "ls"}')]


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        ('Ok.\n<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>', []),
        ("Ok.\n<tool_call>\nls\n</tool_call>", [BASH]),
        ('Ok.\n<tool_call>\n{"name": "bash", "arg', [BASH]),
    ],
    ids=["no tools", "malformed", "cut"],
)
def test_known_parser_loses_nothing_that_is_no_call(qwen3_folder, text, tools):
    known = renderer_for(dataclasses.replace(qwen3_folder, name="Qwen/Qwen3-0.6B"))
    parsed = known.parse(sampled(known, text), tools=tools)
    assert parsed.tool_calls == []
    assert parsed.content.split() == text.split()


def test_template_that_refuses_messages_is_the_callers_error(smollm2_folder):
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}<|im_end|>"
    renderer = GenericRenderer(smollm2_folder.tokenizer, template, special_tokens={}, eos_ids=smollm2_folder.eos_ids)
    with pytest.raises(ProtocolError, match="user first"):
        renderer.render([assistant("Hi")], ())


def system(text):
    return {"role": "system", "content": text}


STRICT = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}
{% endif %}{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}
{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"""
SILENT = """{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}<|im_end|>
{%- endif %}{% endfor %}"""
AS_THEY_ARE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([system("A"), user("Hi")], "[system]A[user]Hi"),
        ([system("A"), system("B"), user("Hi")], "[system]A\n\nB[user]Hi"),
        (
            [system("A"), user("Hi"), assistant("Yes?"), system("B"), user("Go"), system("C")],
            "[system]A[user]Hi[assistant]Yes?[user]B\n\nGo\n\nC",
        ),
        ([user("Hi"), system("B")], "[user]Hi\n\nB"),
        ([system("A"), system("B")], "[system]A\n\nB"),
        ([user("Hi"), assistant("Yes?"), system("B"), assistant("So"), tool("x"), system("C")], None),
    ],
    ids=["one", "several leading", "in the middle", "no leading", "nothing else", "behind a tool result"],
)
@pytest.mark.parametrize("template", [STRICT, SILENT], ids=["refuses", "drops"])
def test_system_messages_that_a_template_does_not_take_are_shown_otherwise(smollm2_folder, template, messages, shown):
    renderer = GenericRenderer(smollm2_folder.tokenizer, template, special_tokens={}, eos_ids=smollm2_folder.eos_ids)
    text = show(smollm2_folder, renderer.render(messages, ())).replace("<|im_end|>", "").replace("\n[", "[")
    assert text.strip() == (
        shown or "[user]Hi[assistant]Yes?[user]B[assistant]So[user]<tool_response>\nx\n</tool_response>\n\nC"
    )


def test_system_messages_stay_as_they_are_where_the_template_takes_them(smollm2_folder):
    renderer = GenericRenderer(smollm2_folder.tokenizer, AS_THEY_ARE, special_tokens={}, eos_ids=smollm2_folder.eos_ids)
    ids = renderer.render([system("A"), system("B"), user("Hi"), system("C"), user("Go")], ())
    assert show(smollm2_folder, ids).replace("<|im_end|>", "") == "[system]A[system]B[user]Hi[system]C[user]Go"


def test_late_system_message_is_bridged_where_it_is_shown_as_a_user_turn(smollm2_folder):
    renderer = GenericRenderer(smollm2_folder.tokenizer, STRICT, special_tokens={}, eos_ids=smollm2_folder.eos_ids)
    history = [system("A"), system("B"), user("Hi")]
    prompt, response = renderer.render(history, ()), sampled(renderer, "Yes?")
    added = renderer.bridge([*history, assistant("Yes?")], prompt, response, [system("C"), user("Go")], ())
    assert show(smollm2_folder, added) == "[user]C\n\nGo<|im_end|>"


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ raise_exception('no') }}"],
    ids=["broken", "leaves the sandbox", "refuses everything"],
)
def test_template_that_cannot_be_used_is_refused_when_the_model_is_opened(smollm2_folder, template):
    with pytest.raises(ModelError):
        GenericRenderer(smollm2_folder.tokenizer, template, special_tokens={}, eos_ids=smollm2_folder.eos_ids)


def test_dates_in_templates_follow_the_clock(smollm2_folder):
    template = "{{ strftime_now('%Y') }}<|im_end|>"
    renderer = GenericRenderer(smollm2_folder.tokenizer, template, special_tokens={}, eos_ids=smollm2_folder.eos_ids)
    assert show(smollm2_folder, renderer.render([user("Hi")], ())).startswith(time.strftime("%Y"))


text = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=40)


@settings(max_examples=60, deadline=None)
@given(system=st.none() | text, first=text, turns=st.lists(st.tuples(text, text), min_size=1, max_size=4))
@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_bridged_conversation_equals_the_rendered_one(request, name, system, first, turns):
    folder, renderer = request.getfixturevalue(f"{name}_folder"), request.getfixturevalue(name)
    messages = [*([] if system is None else [{"role": "system", "content": system}]), user(first)]
    ids = renderer.render(messages, ())
    for answer, question in turns:
        history = [*messages, assistant(answer)]
        response = sampled(renderer, answer)
        # Canonical only if the tokenizer would not join the answer with the text before it.
        assume([*ids, *response] == renderer.encode(f"{show(folder, ids)}{answer}<|im_end|>"))
        ids += [*response, *renderer.bridge(history, ids, response, [user(question)], ())]
        messages = [*history, user(question)]
    assert ids == renderer.render(messages, ())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), first=text, question=text, ended=st.booleans())
def test_bridge_after_random_ids_is_that_after_canonical_ones(smollm2, data, first, question, ended):
    end = smollm2.encode("<|im_end|>")
    response = [*data.draw(st.lists(st.integers(20, smollm2.vocab_size - 1), max_size=12)), *(end if ended else [])]
    prompt, new = smollm2.render([user(first)], ()), [user(question)]
    answer = assistant(smollm2.parse(response).content)
    added = smollm2.bridge([user(first), answer], prompt, response, new, ())
    expected = smollm2.bridge([user(first), assistant("Hello.")], prompt, sampled(smollm2, "Hello."), new, ())
    assert added == [*([] if ended else end), *expected]


@st.composite
def conversations(draw):
    """A history that ends in an answer, and the messages that follow it."""
    history = draw(st.sampled_from([[], [{"role": "system", "content": "Be brief."}]]))
    history = [*history, user("Hi")]
    for _ in range(draw(st.integers(0, 5))):
        thought = draw(st.sampled_from([{}, {"reasoning_content": "Think."}]))
        if draw(st.booleans()):
            history += [{**calling("bash", "{}"), **thought}, tool("a.txt")]
        else:
            history += [{**assistant("Done."), **thought}, user("Go on")]
    answer, following = draw(
        st.sampled_from([(assistant("Yes."), [user("And?")]), (calling("bash", "{}"), [tool("b")])])
    )
    thought = draw(st.sampled_from([{}, {"reasoning_content": "Last."}]))
    return [*history, {**answer, **thought}], draw(st.sampled_from([following, [*following, user("Now?")]]))


@pytest.mark.parametrize("form", ["smollm2", "qwen3", "hermes", "xml", "llama"])
@given(conversation=conversations())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_bridge_needs_no_more_than_the_heart_of_a_history(form, request, conversation):
    renderer = generic(form) if form in ("hermes", "xml", "llama") else request.getfixturevalue(form)
    assert renderer._is_local
    history, following = conversation
    short = renderer.bridge(history, [1], [2], following, [BASH])
    renderer._is_local = False
    try:
        assert short == renderer.bridge(history, [1], [2], following, [BASH])
    finally:
        renderer._is_local = True
