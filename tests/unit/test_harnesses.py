"""Harnesses as data: their files, the rules that read their calls, their installation."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from manege.config import AgentConfig, parse_config
from manege.controller.folders import make_folders
from manege.controller.launch import find_program, harness_launch, task_text
from manege.errors import ConfigError, HarnessError
from manege.harnesses.harness import Harness, load, names, parse
from manege.harnesses.install import find, install
from manege.harnesses.openclaw import settle_context
from manege.harnesses.traffic import read_traffic, recognise
from manege.protocols.base import AskedSampling, ModelRequest
from manege.types import Rollout, RolloutSpec, RolloutState, Task

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
MINIMAL = """
title = "Tiny"
home_page = "https://example.org"
version = "1"
protocol = "chat"
streams = false
command = ["tiny", "{task}"]
[install]
"""


def says(role, content):
    return {"role": role, "content": content}


def request(*messages, tools=(TOOL,), **changes):
    return ModelRequest(messages=messages, tools=tools, sampling=AskedSampling(), raw={}, **changes)


def thread(name, headers=None, *messages, **changes):
    return read_traffic(load(name), headers or {}, request(*messages, **changes)).thread


# Files


@pytest.mark.parametrize("name", names())
def test_a_shipped_file_is_valid_and_pins_every_package(name):
    harness = load(name)
    assert harness.install.npm or harness.install.pypi
    assert all("==" in package for package in harness.install.pypi)
    assert all("@" in package[1:] for package in harness.install.npm)
    assert "{task}" in harness.command


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("stream = true\n", "unknown key 'stream' (value True); did you mean 'streams'?"),
        ("[[threads]]\nthread = 'x'\ntool = true\n", "did you mean 'tools'?"),
        ("[[filters]]\nname = 'x'\npattern = '('\n", "is not a regular expression"),
        ("= 1", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_nearest_right_key(change, message):
    head, install_table = MINIMAL.split("[install]")
    text = head + change + "[install]" + install_table if not change.startswith("[") else MINIMAL + change
    with pytest.raises(HarnessError) as refused:
        parse("tiny", text)
    assert message in str(refused.value)


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(HarnessError, match="did you mean 'claude-code'"):
        load("claude-cod")


# Threads


def test_an_unknown_program_has_one_thread_and_no_edits():
    asked = request(says("system", "x-anthropic-billing-header: a"), tools=(), json_schema={})
    traffic = read_traffic(None, {"x-claude-code-agent-id": "7"}, asked)
    assert (traffic.thread, traffic.edits) == ("main", ())
    assert traffic.request is asked


@pytest.mark.parametrize(
    ("name", "headers", "changes", "wanted"),
    [
        ("claude-code", {}, {}, "main"),
        ("claude-code", {"x-claude-code-agent-id": "a7"}, {}, "agent:a7"),
        ("claude-code", {}, {"tools": (), "json_schema": {}}, "side:title"),
        ("claude-code", {}, {"tools": ()}, "side:other"),
        ("codex", {"thread-id": "t1"}, {}, "main"),
        ("codex", {"thread-id": "t2", "x-codex-parent-thread-id": "t1", "x-openai-subagent": "s"}, {}, "agent:t2"),
        ("codex", {"x-openai-subagent": "review"}, {}, "agent:review"),
        ("codex", {"x-codex-turn-metadata": '{"request_kind":"turn"}'}, {}, "main"),
        ("codex", {"x-codex-turn-metadata": '{"request_kind":"compaction"}'}, {}, "side:summary"),
        ("opencode", {"x-session-id": "s2", "x-parent-session-id": "s1"}, {}, "agent:s2"),
        ("openhands", {}, {"tools": ()}, "side:summary"),
        ("qwen-code", {}, {"tools": ()}, "side:other"),
    ],
)
def test_structure_and_headers_name_the_thread(name, headers, changes, wanted):
    assert thread(name, headers, says("user", "Do it."), **changes) == wanted


@pytest.mark.parametrize(
    ("name", "system", "wanted"),
    [
        ("opencode", "You are a title generator. You output ONLY a thread title.", "side:title"),
        ("opencode", "Summarize the conversation.", "side:summary"),
        ("pi", "You are a context summarization assistant.", "side:summary"),
    ],
)
def test_instructions_name_the_thread(name, system, wanted):
    assert thread(name, {}, says("system", system), says("user", "Do it."), tools=()) == wanted


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({"user-agent": "claude-cli/2.1.332 (external, cli)"}, "claude-code"),
        ({"user-agent": "codex_exec/0.171.0 (Debian)"}, "codex"),
        ({"user-agent": "opencode/1.18.33 ai-sdk"}, "opencode"),
        ({"user-agent": "OpenAI/Python 2.54.0", "x-title": "OpenHands"}, "openhands"),
        ({"user-agent": "OpenAI/Python 2.54.0"}, None),
        ({}, None),
    ],
)
def test_a_harness_is_recognised_by_what_only_it_sends(headers, wanted):
    found = recognise(headers)
    assert (found.name if found else None) == wanted


# Filters


def test_the_attribution_line_goes_and_is_recorded():
    line = "x-anthropic-billing-header: cc_version=2.1.332.abc; cch=1f3;"
    asked = request(says("system", f"{line}\nYou are an agent."), says("user", f"{line}\nstays"))
    traffic = read_traffic(load("claude-code"), {}, asked)
    assert [message["content"] for message in traffic.request.messages] == ["You are an agent.", f"{line}\nstays"]
    assert len(traffic.edits) == 1
    assert line in traffic.edits[0]


def test_without_noise_the_request_is_the_same_object():
    asked = request(says("system", "You are an agent."), says("user", "Hi"))
    traffic = read_traffic(load("claude-code"), {}, asked)
    assert traffic.request is asked
    assert traffic.edits == ()


def test_an_optional_filter_is_asked_for():
    harness = parse("tiny", MINIMAL + "[[filters]]\nname = 'date'\npattern = 'Today is .*'\noptional = true\n")
    asked = request(says("system", "Today is Monday"))
    assert read_traffic(harness, {}, asked).edits == ()
    assert read_traffic(harness, {}, asked, with_optional=True).request.messages[0]["content"] == ""


def test_openclaws_context_goes_back_to_where_it_first_stood():
    system, task, context = (
        says("system", "s"),
        says("user", "t"),
        says("user", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> c"),
    )
    answer, result = says("assistant", "a"), says("tool", "r")
    first = request(system, task, context)
    assert settle_context(first) == (first, ())
    moved = request(system, task, answer, result, context)
    settled, (line,) = settle_context(moved)
    assert settled == replace(moved, messages=[system, task, context, answer, result])
    assert line == "context of the moment: from message 4 to 2"
    assert read_traffic(load("openclaw"), {}, moved).edits == (line,)


# Configuration and launch


def agent_config(**agent):
    return parse_config({"name": "r", "tasks": {"train": "t"}, "scorer": {"run": "a:b"}, "agent": agent}).agent


@pytest.mark.parametrize("agent", [{}, {"run": "a:b", "harness": "codex"}, {"run": "a:b", "task": "{x}"}])
def test_an_agent_is_a_program_or_a_harness(agent):
    with pytest.raises(ConfigError, match="harness"):
        agent_config(**agent)


@pytest.mark.parametrize(
    ("agent", "task", "told"),
    [
        ({}, {"prompt": "p"}, "p"),
        ({}, {"prompt": "p", "task": "t"}, "t"),
        ({"task": "Q: {question}"}, {"question": "q", "task": "t"}, "Q: q"),
    ],
)
def test_a_harness_is_told_the_task(agent, task, told):
    assert task_text(agent_config(harness="codex", **agent), task) == told


def test_a_task_without_text_is_refused():
    with pytest.raises(HarnessError, match=r"it has question. Set agent.task"):
        task_text(agent_config(harness="codex"), {"question": "q"})


def test_a_harness_that_is_not_installed_is_refused_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("MANEGE_HARNESSES", str(tmp_path))
    with pytest.raises(HarnessError, match='run "manege harness install codex"'):
        find_program(AgentConfig(harness="codex"))


# Installation


def npm_package(folder, version="1.0.0"):
    """A package with one program, on disk."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    program = folder / "bin" / "tiny"
    program.write_text(f"#!/bin/sh\necho tiny {version}\n")
    program.chmod(0o755)
    (folder / "package.json").write_text(json.dumps({"name": "tiny", "version": version, "bin": {"tiny": "bin/tiny"}}))
    return folder


@pytest.fixture
def tiny(tmp_path) -> Harness:
    package = npm_package(tmp_path / "package")
    return parse("tiny", MINIMAL + f'npm = ["{package}"]\n[files]\n".tiny/config" = "key={{key}} {{gateway}}"\n')


def test_what_is_installed_is_found_and_not_installed_again(tiny, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(HarnessError, match="manege harness install tiny"):
        find(tiny, root)
    assert install(tiny, root)
    program = find(tiny, root).program("tiny")
    assert subprocess.check_output([program], text=True) == "tiny 1.0.0\n"
    assert not install(tiny, root)


def test_a_half_finished_installation_is_redone(tiny, tmp_path):
    root = tmp_path / "root"
    (root / "tiny" / "node_modules").mkdir(parents=True)
    (root / "tiny" / "node_modules" / "half").touch()
    assert install(tiny, root)
    assert not (root / "tiny" / "node_modules" / "half").exists()


def test_another_version_is_another_installation(tiny, tmp_path):
    root = tmp_path / "root"
    install(tiny, root)
    newer = tiny.model_copy(update={"version": "2"})
    with pytest.raises(HarnessError, match="tiny 2 is not installed"):
        find(newer, root)
    assert install(newer, root)


def test_a_package_that_does_not_install_is_an_error_with_what_was_said(tmp_path):
    broken = parse("tiny", MINIMAL + f'npm = ["{tmp_path / "missing"}"]\n')
    with pytest.raises(HarnessError, match="Could not read package"):
        install(broken, tmp_path / "root")
    with pytest.raises(HarnessError):
        find(broken, tmp_path / "root")


def test_a_launch_writes_the_files_and_fills_the_command(tmp_path, monkeypatch):
    """Of a shipped harness, with stand-in programs where its own would be installed."""
    monkeypatch.setenv("MANEGE_HARNESSES", str(tmp_path / "root"))
    harness = load("codex")
    programs = tmp_path / "root" / "codex" / "node_modules" / ".bin"
    programs.mkdir(parents=True)
    (programs / "codex").symlink_to(sys.executable)
    marker = {"version": harness.version, **harness.install.model_dump()}
    (tmp_path / "root" / "codex" / "installed.json").write_text(json.dumps(marker))
    spec = RolloutSpec(id="r", run="run", task=Task(id="t", input={}))
    rollout = Rollout(spec=spec, state=RolloutState.RUNNING, attempt=0, created_s=0)
    folders = make_folders(tmp_path / "run", rollout)
    launch = harness_launch(
        "codex", task="Do {this}.", gateway_url="http://h:1", agent_key="k", context_limit=4096, folders=folders
    )
    config = (folders.home / ".codex" / "config.toml").read_text()
    assert 'base_url = "http://h:1/v1"' in config
    assert "model_context_window = 4096" in config
    assert launch.program[-1] == "Do {this}."
    assert launch.program[0] == str(programs / "codex")
    assert launch.env["PATH"].split(os.pathsep)[0] == str(programs)
    assert launch.readable == [str(tmp_path / "root" / "codex")]
    assert launch.javascript
