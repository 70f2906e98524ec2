"""Tasks for an agent with a computer: each can be solved with what it shows, and by nothing less."""

import os
import random
import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manege.controller.record import AttemptRecord
from manege.errors import ConfigError
from manege.recipes.general.draw import CITIES, NAMES, WORDS, Draw, is_heldout
from manege.recipes.general.families import FAMILIES
from manege.recipes.general.families.problem import PART
from manege.recipes.general.left import Left
from manege.recipes.general.scorer import score
from manege.recipes.general.tasks import generate, prepare

GENERATED = [(family, level) for family in FAMILIES for level in range(1, 6)]
IDS = [f"{family}{level}" for family, level in GENERATED]


def made(family, level, seed, *, heldout=False):
    return FAMILIES[family].make(Draw(random.Random(seed), heldout=heldout), level)


def lay(problem, folder):
    for name, text in problem.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def scored(family, problem, folder, stdout=""):
    return FAMILIES[family].score(problem.hidden, Left(workspace=folder, stdout=stdout))


def asked_file(problem):
    """Where the outcome belongs."""
    return (
        "answer.txt"
        if problem.answers
        else problem.hidden.get("file") or re.search(r"(plan\.csv|note\.txt|\w+\.py)", problem.question)[1]
    )


@pytest.mark.parametrize(("family", "level"), GENERATED, ids=IDS)
@pytest.mark.parametrize("heldout", [False, True], ids=["train", "heldout"])
def test_a_program_that_sees_what_the_agent_sees_solves_it(tmp_path, family, level, heldout):
    problem = made(family, level, f"solve {level}", heldout=heldout)
    lay(problem, tmp_path)
    assert scored(family, problem, tmp_path) == 0
    done = subprocess.run(["bash", "-c", problem.solution], cwd=tmp_path, capture_output=True, text=True)
    assert scored(family, problem, tmp_path) == 1, (problem.question, done.stderr)


@pytest.mark.full
@pytest.mark.parametrize(("family", "level"), GENERATED, ids=IDS)
@given(seed=st.integers(0, 2**32), heldout=st.booleans())
@settings(max_examples=15, deadline=None)
def test_it_is_solved_whatever_the_seed(tmp_path_factory, family, level, seed, heldout):
    folder = tmp_path_factory.mktemp("workspace")
    problem = made(family, level, seed, heldout=heldout)
    lay(problem, folder)
    assert scored(family, problem, folder) == 0
    subprocess.run(["bash", "-c", problem.solution], cwd=folder, check=True, capture_output=True)
    assert scored(family, problem, folder) == 1, problem.question


def nothing(problem, folder):
    return ""


def empty_file(problem, folder):
    (folder / asked_file(problem)).write_text("")
    return "\n\n"


def the_question(problem, folder):
    (folder / asked_file(problem)).write_text(problem.question)
    return problem.question


def the_files(problem, folder):
    """All that was given, as the answer."""
    text = "".join(problem.files.values())
    (folder / asked_file(problem)).write_text(text)
    return text


def each_line_somewhere(problem, folder):
    """Every word of the files on a line of its own: the right one is among them."""
    words = sorted(set(re.findall(r"[\w@.-]+", " ".join(problem.files.values()))))
    return "\n".join([*words, "done"])


def a_link_out(problem, folder):
    target = folder / asked_file(problem)
    target.unlink(missing_ok=True)
    os.symlink("/etc/passwd", target)
    return ""


def a_pipe(problem, folder):
    target = folder / asked_file(problem)
    target.unlink(missing_ok=True)
    os.mkfifo(target)
    return ""


def a_constant_program(problem, folder):
    """Prints what an example shows; for other families it is a file like any other."""
    shown = re.findall("output: (.*)", problem.files.get("examples.txt", "output: 7"))[0]
    (folder / asked_file(problem)).write_text(f"print({shown!r})\n")
    return "done"


def all_at_once(problem, folder):
    """A plan that begins everything at once, or a header alone."""
    jobs = problem.files.get("jobs.csv", "job\nx,1").splitlines()[1:]
    (folder / asked_file(problem)).write_text("".join(f"{job.split(',')[0]},1,0\n" for job in jobs))
    return "0"


LAZY = [
    nothing,
    empty_file,
    the_question,
    the_files,
    each_line_somewhere,
    a_link_out,
    a_pipe,
    a_constant_program,
    all_at_once,
]


@pytest.mark.parametrize("lazy", LAZY, ids=lambda lazy: lazy.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_laziness_and_tricks_earn_nothing(tmp_path, family, lazy):
    for level in (1, 3, 5):
        folder = tmp_path / str(level)
        folder.mkdir()
        problem = made(family, level, f"lazy {level}")
        lay(problem, folder)
        stdout = lazy(problem, folder)
        assert scored(family, problem, folder, stdout) == 0, (level, problem.question)


@pytest.mark.parametrize(
    ("family", "level", "spoil"),
    [
        ("transform", 5, "sed -i '$ d' totals.csv"),
        ("extract", 4, "sed -i '1 s/:/./' errors.csv"),
        ("schedule", 5, "sed -i '$ s/,[0-9]*$/,9999/' plan.csv"),
        ("fix", 4, "sed -i '/^print/ s/print(\\(.*\\))/print(\\1 if len(numbers) != 9 else 0)/' *.py"),
        ("format", 5, "echo 'one, more' >> note.txt"),
    ],
)
def test_a_part_of_the_work_earns_a_part(tmp_path, family, level, spoil):
    """Over several seeds: something is gained, and never all of it."""
    rewards = []
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        problem = made(family, level, seed)
        lay(problem, folder)
        subprocess.run(["bash", "-c", f"{problem.solution}\n{spoil}"], cwd=folder, check=True)
        rewards.append(scored(family, problem, folder))
    assert all(reward <= PART or reward == 1 for reward in rewards)
    assert any(0 < reward <= PART for reward in rewards), rewards


def test_a_plan_in_which_a_worker_does_two_jobs_at_a_time_is_none(tmp_path):
    problem = made("schedule", 4, "double")
    lay(problem, tmp_path)
    subprocess.run(["bash", "-c", problem.solution], cwd=tmp_path, check=True)
    assert scored("schedule", problem, tmp_path) == 1
    plan = (tmp_path / "plan.csv").read_text()
    (tmp_path / "plan.csv").write_text(plan.replace(",2,", ",1,"))
    assert scored("schedule", problem, tmp_path) == 0
    (tmp_path / "plan.csv").write_text(plan + plan.splitlines()[0])
    assert scored("schedule", problem, tmp_path) == 0


def test_programs_of_the_agent_do_not_reach_the_scorer(tmp_path):
    """A hanging, a flooding and a killing one."""
    problem = made("fix", 1, "hostile")
    lay(problem, tmp_path)
    left = Left(workspace=tmp_path, stdout="")
    for program in ("raise SystemExit(3)", "print('x' * 3_000_000)", "import os; os.kill(os.getpid(), 9)"):
        (tmp_path / problem.hidden["script"]).write_text(program)
        assert left.run(problem.hidden["script"], "1 2 3") == ""
        assert scored("fix", problem, tmp_path) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_no_word_of_one_split_is_in_the_other(family):
    """So that no task of one can be one of the other."""
    pools = (WORDS, NAMES, CITIES)

    def drawn(problem):
        text = " ".join([problem.question, *problem.files, *problem.files.values()])
        found = set(re.findall(r"[A-Za-z]+", text))
        return {is_heldout(pool, word) for pool in pools for word in found if word in pool}

    for level in range(1, 6):
        for seed in range(8):
            train, heldout = (made(family, level, seed, heldout=split) for split in (False, True))
            assert drawn(train) <= {False}, (level, seed)
            assert drawn(heldout) == {True}, (level, seed)


def test_tasks_are_those_of_their_seed_and_held_out_ones_of_none():
    def tasks(split, seed, num=24, **options):
        return generate(split=split, num=num, seed=seed, **options)

    assert tasks("train", 0) == tasks("train", 0) != tasks("train", 1)
    assert tasks("heldout", 0) == tasks("heldout", 1)
    assert not {t.id for t in tasks("train", 0)} & {t.id for t in tasks("heldout", 0)}
    assert {t.hidden["family"] for t in tasks("train", 0)} == set(FAMILIES)
    only = tasks("train", 0, families=["find", "fix"], levels=[2])
    assert {t.id.split("-")[0] for t in only} == {"find2", "fix2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"families": ["fnd"]}, "no family 'fnd'"), ({"levels": [0]}, "levels are 1 to 5"), ({"levels": []}, "1 to 5")],
)
def test_a_family_or_level_that_there_is_not_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        generate(split="train", num=1, seed=0, **options)


def test_the_scorer_judges_files_and_output_of_an_attempt(tmp_path):
    (task,) = generate(split="train", num=1, seed=0, families=["find"], levels=[1])
    prepare(task, tmp_path)
    value = task.hidden["value"]

    def attempt(stdout):
        record = AttemptRecord(workspace=tmp_path, stdout=stdout, stderr="", exit_code=0, timed_out=False, calls=[])
        return score(task, record)

    assert attempt(f"so it is\n {value} \n") == 1
    assert attempt(f"it is {value}") == attempt(f"{value}\nor not") == 0
    (tmp_path / "answer.txt").write_text("000")
    assert attempt(value) == 0
