"""Task files and generators."""

import pytest

from manege.config import TasksConfig
from manege.errors import ConfigError, HarnessError
from manege.recipes.finder.tasks import generate, prepare
from manege.trainer.tasks import load_tasks, task_order


def test_rows_become_tasks(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"id": "a", "input": {"q": 1}, "hidden": {"x": 2}}\n\n{"id": "b", "input": {}}\n')
    tasks = load_tasks(TasksConfig(train=str(path)), "train", seed=0)
    assert [(t.id, t.input, t.hidden) for t in tasks] == [("a", {"q": 1}, {"x": 2}), ("b", {}, {})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "gives no task"),
        ('{"id": "a", "input": {}}\n{"id": ', r"line 2: not JSON .*'\{\"id\": '"),
        ('{"id": 3, "input": {}}', "line 1: want"),
        ('{"id": "a", "input": "q"}', "line 1: want"),
        ('{"id": "a", "input": {}, "answer": 3}', r"line 1: unknown or wrong fields \['answer'\]"),
        ('{"id": "a", "input": {}}\n{"id": "a", "input": {}}', "task id 'a' comes twice"),
    ],
)
def test_broken_task_files_are_named(tmp_path, text, message):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tasks(TasksConfig(train=str(path)), "train", seed=0)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (TasksConfig(train="no.jsonl"), ConfigError, "no.jsonl cannot be read"),
        (TasksConfig(train="no_module:f"), HarnessError, "module 'no_module' cannot be imported"),
        (TasksConfig(train="json:no"), HarnessError, "has no function 'no'"),
        (TasksConfig(train="manege.recipes.finder.tasks:generate"), ConfigError, "tasks.num_train is missing"),
        (
            TasksConfig(train="manege.recipes.finder.tasks:generate", num_train=2, options={"hop": 1}),
            ConfigError,
            "do not fit",
        ),
    ],
)
def test_task_sources_that_cannot_be_used_are_named(config, error, message):
    with pytest.raises(error, match=message):
        load_tasks(config, "train", seed=0)


def test_order_is_shuffled_epochs_and_does_not_depend_on_where_it_starts():
    whole = task_order(5, 0, 15, seed=1)
    assert [sorted(whole[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert whole[0:5] != whole[5:10]
    assert task_order(5, 7, 8, seed=1) == whole[7:]
    assert task_order(5, 0, 15, seed=2) != whole


def test_finder_tasks_lead_to_their_value_and_splits_share_nothing(tmp_path):
    train, heldout = (generate(split=s, num=300, seed=0) for s in ("train", "heldout"))
    assert not {t.id for t in train} & {t.id for t in heldout}
    assert not {t.hidden["value"] for t in train} & {t.hidden["value"] for t in heldout}
    assert heldout == generate(split="heldout", num=300, seed=1)
    assert train != generate(split="train", num=300, seed=1)
    task = next(t for t in train if len(t.hidden["chain"]) == 3)
    prepare(task, tmp_path)
    name = task.input["question"].split()[-1].rstrip(".")
    for _ in range(2):
        name = (tmp_path / name).read_text().split()[-1]
    assert (tmp_path / name).read_text().strip().endswith(f"={task.hidden['value']}")
    assert not any(task.hidden["value"] in str(v) for v in task.input.values())
