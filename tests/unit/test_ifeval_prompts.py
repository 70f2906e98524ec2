"""Our own prompts for IFEval's instructions, rows of others, and the command that prints the four numbers."""

import itertools
import json
import random
import subprocess
import sys

import pytest

from manege.errors import ConfigError
from manege.recipes.general.draw import Draw
from manege.recipes.general.ifeval.accuracy import judge
from manege.recipes.general.ifeval.checks import CHECKS
from manege.recipes.general.ifeval.compose import compose
from manege.recipes.general.ifeval.prompts import Instruction, conflict, make_prompt
from manege.recipes.general.ifeval.rows import generate, make_rows
from manege.recipes.general.public import agreement, task_of

ROWS = make_rows(split="heldout", num=225, seed=0)


def instructions(row):
    pairs = zip(row["instruction_id_list"], row["kwargs"], strict=True)
    return [Instruction(type=kind, arguments=given, text="") for kind, given in pairs]


def composed(row):
    return compose(instructions(row))


def test_prompts_are_of_all_types_alone_and_together():
    sizes = [len(row["instruction_id_list"]) for row in ROWS]
    assert [sizes.count(n) for n in (1, 2, 3)] == pytest.approx([75, 75, 75], abs=8)
    assert {row["instruction_id_list"][0] for row in ROWS if len(row["instruction_id_list"]) == 1} == set(CHECKS)
    assert len({row["prompt"] for row in ROWS}) == len(ROWS)
    assert {row["key"] for row in ROWS}.isdisjoint(row["key"] for row in make_rows(split="train", num=225, seed=0))


def test_each_prompt_can_be_followed_as_a_whole():
    for row in ROWS:
        followed = judge(composed(row), row["instruction_id_list"], row["kwargs"])
        assert all(followed.strict), (row["prompt"], composed(row), followed.strict)


def test_no_two_types_that_may_meet_contradict_each_other():
    pairs = [pair for pair in itertools.combinations(sorted(CHECKS), 2) if not conflict(*pair)]
    assert len(pairs) > 100
    draw = Draw(random.Random(0), heldout=False)
    for pair in pairs:
        prompt = make_prompt(draw, pair)
        text = compose(prompt.instructions)
        followed = judge(
            text, [one.type for one in prompt.instructions], [one.arguments for one in prompt.instructions]
        )
        assert all(followed.strict), (prompt.text, text)


def test_a_plain_answer_follows_few_of_them():
    """The prompts ask for something."""
    plain = "A kite is a toy, made of paper and wood. It flies when the wind blows. Have fun!"
    follow = [all(judge(plain, row["instruction_id_list"], row["kwargs"]).strict) for row in ROWS]
    assert sum(follow) / len(follow) < 0.12


def test_rows_of_a_file_become_tasks_and_broken_ones_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"key": 7, "prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]}
    path.write_text(json.dumps(row) + "\n")
    (task,) = generate(split="heldout", num=541, seed=0, source=str(path))
    assert task.input == {"prompt": "p"}
    assert task.hidden == {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    path.write_text(json.dumps(row | {"instruction_id_list": ["punctuation:no_dot"]}))
    with pytest.raises(ConfigError, match=r"prompt 7 has instructions that are not known: .*no_dot"):
        generate(split="heldout", num=1, seed=0, source=str(path))
    path.write_text('{"key": 7, "prompt": "p"}')
    with pytest.raises(ConfigError, match="row 1: instruction_id_list, kwargs missing"):
        generate(split="heldout", num=1, seed=0, source=str(path))


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "manege.recipes.general.ifeval", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_prints_the_four_numbers_of_a_file_of_responses(tmp_path):
    rows = [row for row in ROWS if len(row["instruction_id_list"]) == 2][:4]
    responses = [composed(rows[0]), f"Sure, here you are:\n{composed(rows[1])}", "", composed(rows[3])]
    path, prompts = tmp_path / "responses.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = zip(rows, responses, strict=True)
    path.write_text("".join(json.dumps({"prompt": row["prompt"], "response": text}) + "\n" for row, text in pairs))
    done = command(path, "--rows", prompts, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["num_prompts"] == 4
    assert found["prompt_loose"] == 0.75 >= found["prompt_strict"] >= 0.5
    assert found["instruction_loose"] == 0.75 >= found["instruction_strict"]
    refused = command(path)
    assert refused.returncode == 2
    assert "--rows" in refused.stderr


def test_public_rows_of_the_paper_become_tasks():
    row = {"id": 3, "domain": "instruct_pretrain", "problem_statement": "Who?", "ground_truth": "Ada"}
    task = task_of(row | {"input_files": '{"a/b.txt": "text", "none.txt": null}'}, "train")
    assert task.hidden == {"files": {"documents/a/b.txt": "text"}, "truth": "Ada"}
    assert "documents/" in task.input["question"]
    assert "answer.txt" in task.input["task"]
    assert "Ada" not in str(task.input)
    with pytest.raises(ConfigError, match="outside of its folder"):
        task_of(row | {"input_files": {"../x": "y"}}, "train")
    with pytest.raises(ConfigError, match="not of the known form"):
        task_of({"id": 3, "question": "Who?"}, "train")


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        (r"So it is \boxed{B}.", "B", 1),
        ("B", "C", 0),
        ("A B C D", "B", 0),
        ("", "B", 0),
        ("1,250.0", "1250", 1),
        ("about 1250", "1250", 0),
        ("", "1250", 0),
        ("the cat sat", "The cat sat!", 1),
        ("the cat", "the cat sat down", 2 * 2 / 6),
        ("", "the cat", 0),
    ],
)
def test_public_answers_are_compared(answer, truth, reward):
    assert agreement(answer, truth) == pytest.approx(reward)


def test_without_a_hub_the_way_out_is_named():
    if "datasets" in sys.modules:
        pytest.skip("datasets is loaded")
    done = subprocess.run(
        [sys.executable, "-c", "from manege.recipes.general.hub import hub_rows; hub_rows('no/such', split='train')"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin", "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"},
        timeout=120,
    )
    assert "ConfigError: the data set 'no/such'" in done.stderr
    assert "manege[general]" in done.stderr or "take a .jsonl file" in done.stderr
