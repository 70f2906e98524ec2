"""The search recipe: its world, questions and scorer, and public question sets as files."""

import json
from pathlib import Path

import pytest

from manege.controller.record import AttemptRecord
from manege.controller.verdict import parse_verdict
from manege.errors import ConfigError
from manege.recipes.search import public
from manege.recipes.search.corpus import NUM_ENTITIES, passages
from manege.recipes.search.scorer import PART, exact_match, f1, normalised, score
from manege.recipes.search.tasks import generate
from manege.recipes.search.world import MAX_ENTITIES, make_world
from manege.types import Task
from tests.calls import make_call

SMALL = {"num_entities": 400, "world": 3}
TASK = Task(
    id="t",
    input={"question": "Where is the employer of Ada Coleman based?"},
    hidden={
        "answers": ["North Ashford", "Ashford, North"],
        "chain": [{"fact": "Ada Coleman works for Iron Bay Oil."}, {"fact": "Iron Bay Oil is based in North Ashford."}],
    },
)
FIRST, SECOND = (f"Iron: {step['fact']} More." for step in TASK.hidden["chain"])


def test_every_fact_of_a_chain_stands_in_the_passage_that_the_step_before_names():
    text = {passage["id"]: passage["text"] for passage in passages(400, 3)}
    for task in generate(split="train", num=60, seed=1, **SMALL):
        chain, answer = task.hidden["chain"], task.hidden["answers"][0]
        assert chain[0]["title"] in task.input["question"]
        for step, named in zip(chain, [*(step["title"] for step in chain[1:]), answer], strict=True):
            assert step["fact"] in text[step["id"]]
            assert named in step["fact"]
            assert named not in task.input["question"]


def test_questions_have_the_hops_that_were_asked_for_and_none_comes_twice():
    assert {len(task.hidden["chain"]) for task in generate(split="train", num=50, seed=0, **SMALL)} == {1, 2, 3}
    tasks = generate(split="heldout", num=40, seed=0, hops=[2], **SMALL)
    assert {len(task.hidden["chain"]) for task in tasks} == {2}
    assert len({task.input["question"] for task in tasks}) == 40


def test_train_and_heldout_share_no_entity_and_heldout_questions_do_not_depend_on_the_seed():
    def named(tasks):
        return {name for task in tasks for name in (*task.hidden["answers"], *(s["id"] for s in task.hidden["chain"]))}

    train, heldout = (generate(split=split, num=50, seed=1, **SMALL) for split in ("train", "heldout"))
    assert not named(train) & named(heldout)
    assert generate(split="heldout", num=50, seed=2, **SMALL) == heldout
    assert generate(split="train", num=50, seed=2, **SMALL) != train


def test_facts_of_another_world_are_others_so_that_answers_cannot_be_learnt_by_heart():
    def facts(seed):
        return {(entity.name, fact.relation.name): fact.to.name for entity in make_world(4000, seed, 3).train
                for fact in entity.facts}  # fmt: skip

    one, other = facts(0), facts(1)
    both = one.keys() & other.keys()
    assert len(both) > 100
    assert sum(one[key] == other[key] for key in both) < len(both) / 50


def test_a_large_world_has_one_passage_per_entity_unique_names_and_namesakes():
    found = list(passages(NUM_ENTITIES, 0))
    names = {passage["title"] for passage in found}
    assert len(names) == len({passage["id"] for passage in found}) == len(found) == NUM_ENTITIES
    people = [name.split() for name in names if name.count(" ") == 2 and not name.startswith("The ")]
    assert sum(f"{first} {last}" in names for first, _, last in people) > 500


def test_what_cannot_be_generated_is_said():
    with pytest.raises(ConfigError, match="100 to"):
        make_world(MAX_ENTITIES + 1, 0, 3)
    with pytest.raises(ConfigError, match=r"hops = \[4\]"):
        generate(split="train", num=1, seed=0, hops=[4])
    with pytest.raises(ConfigError, match="have more entities or fewer tasks"):
        generate(split="heldout", num=1000, seed=0, num_entities=200)


@pytest.mark.parametrize(
    ("said", "golden", "is_right", "overlap"),
    [
        # Of the documentation of the metric `squad` (huggingface.co/spaces/evaluate-metric/squad).
        ("1976", ["1976"], True, 1.0),
        # Of SQuAD's development set, with its answers.
        ("Denver Broncos", ["Denver Broncos", "Denver Broncos", "Denver Broncos"], True, 1.0),
        ("the Denver Broncos!", ["Denver Broncos"], True, 1.0),
        ("Carolina", ["Carolina Panthers"], False, 2 / 3),
        ("Levi's Stadium in the San Francisco Bay Area", ["Santa Clara, California", "Levi's Stadium"], False, 4 / 9),
        ("rock", ["rock n roll"], False, 0.5),
        ("an apple a day", ["apple"], False, 2 / 3),
        ("", ["Denver Broncos"], False, 0.0),
    ],
)
def test_answers_are_compared_as_squad_does(said, golden, is_right, overlap):
    assert (exact_match(said, golden), f1(said, golden)) == (is_right, pytest.approx(overlap))


def test_answers_are_normalised_as_squad_does():
    assert normalised("   Rock    n  Roll.") == "rock n roll"
    assert normalised("The A-Team, an anthem") == "ateam anthem"


def scored(stdout, *observations, continued=True, role="tool"):
    """After one call per observation, and the first."""
    history = [{"role": "user", "content": TASK.input["question"]}]
    calls = [make_call("c0", [1], [2], request={"messages": list(history)})]
    for number, observation in enumerate(observations, start=1):
        new = [{"role": "assistant", "content": "search"}, {"role": role, "content": observation}]
        history += new
        calls.append(make_call(f"c{number}", [1], [2], request={"messages": new if continued else list(history)}))
    record = AttemptRecord(
        workspace=Path("/"), stdout=stdout, stderr="", exit_code=0, timed_out=False, calls=calls
    )  # fmt: skip
    return parse_verdict(json.dumps(score(TASK, record)), []).reward


@pytest.mark.parametrize("continued", [True, False])
def test_a_right_answer_is_one_and_a_wrong_one_a_part_for_each_fact_read(continued):
    assert scored("Ashford, north\n", FIRST, SECOND, continued=continued) == 1.0
    assert scored("log line\nThe North Ashford.", continued=continued) == 1.0
    assert scored("Paris") == 0.0
    assert scored("Paris", FIRST, continued=continued) == pytest.approx(PART / 2)
    assert scored("Paris", FIRST, FIRST, continued=continued) == pytest.approx(PART / 2)
    assert scored("Paris", "a passage", FIRST, SECOND, continued=continued) == pytest.approx(PART)


@pytest.mark.parametrize("stdout", ["", "\n \n", "...", "the\n"])
def test_without_an_answer_there_is_nothing_whatever_was_read(stdout):
    assert scored(stdout, FIRST, SECOND) == 0.0


def test_what_the_model_wrote_itself_and_what_it_was_told_first_is_not_read():
    assert scored("Paris", FIRST, SECOND, role="assistant") == 0.0
    told = make_call("c0", [1], [2], request={"messages": [{"role": "user", "content": FIRST}]})
    again = make_call("c1", [1], [2], request={"messages": [{"role": "user", "content": FIRST}]})
    record = AttemptRecord(workspace=Path("/"), stdout="Paris", stderr="", exit_code=0, timed_out=False,
                           calls=[told, again])  # fmt: skip
    assert score(TASK, record)["reward"] == 0.0


HOTPOT = {
    "id": "dev_0",
    "question": "Were Scott Derrickson and Ed Wood of the same nationality?",
    "golden_answers": ["yes"],
    "metadata": {"supporting_facts": {"title": ["Scott Derrickson", "Ed Wood", "Ed Wood"], "sent_id": [0, 0, 1]}},
}
MUSIQUE = {
    "question": "Who founded it?",
    "golden_answers": ["Ada", "Ada L."],
    "metadata": {"paragraphs": [{"title": "A", "is_supporting": True}, {"title": "B", "is_supporting": False}]},
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_public_questions_come_from_files_with_their_answers_and_pages(tmp_path, ending):
    file = tmp_path / f"dev.{ending}"
    rows = [HOTPOT, {**HOTPOT, "id": "dev_1"}]
    if ending == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = public.generate(split="heldout", num=2, seed=0, heldout=str(file))
    assert {task.id for task in tasks} == {"dev-dev_0", "dev-dev_1"}
    assert tasks[0].input == {"question": HOTPOT["question"]}
    assert tasks[0].hidden["answers"] == ["yes"]
    assert [step["fact"] for step in tasks[0].hidden["chain"]] == ["Scott Derrickson:", "Ed Wood:"]


def test_marked_paragraphs_are_a_chain_too_and_rows_without_an_answer_are_named(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(MUSIQUE))
    [task] = public.generate(split="train", num=1, seed=0, train=str(file))
    assert (task.hidden["answers"], task.hidden["chain"]) == (["Ada", "Ada L."], [{"title": "A", "fact": "A:"}])
    file.write_text(json.dumps({"id": "x", "query": "who?"}))
    with pytest.raises(ConfigError, match="train-x: want question and golden_answers, got id, query"):
        public.generate(split="train", num=1, seed=0, train=str(file))
    with pytest.raises(ConfigError, match=r"2 tasks of the split train were wanted, .* has 1"):
        public.generate(split="train", num=2, seed=0, train=str(file))
