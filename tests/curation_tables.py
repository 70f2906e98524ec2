"""Tables of coding tasks in SWE-smith's columns, with as many rows of each kind as a test wants."""

import json
import random

NUM_ROWS = 59_136
"""Of SWE-smith's table."""
EMPTY, MISSING, MANY, EVALUATED, ALWAYS, MIXED = 18_033, 1_265, 2_338, 1_500, 12_000, 5_012
"""Rows that drop out for each reason, and what an agent did with the rest: it solved all others never."""
NEVER = NUM_ROWS - EMPTY - MISSING - MANY - EVALUATED - ALWAYS - MIXED
ROLLOUTS = 8
_OWNED = [f"owner{number % 40}/package{number}" for number in range(128)]
EVALUATION = ["django/django", "sympy/sympy", "pallets/flask"]


def kinds():
    """What becomes of each row, shuffled."""
    counts = {"empty": EMPTY, "missing": MISSING, "many": MANY, "evaluated": EVALUATED}
    counts |= {"always": ALWAYS, "mixed": MIXED, "never": NEVER}
    found = [kind for kind, count in counts.items() for _ in range(count)]
    random.Random(0).shuffle(found)
    return found


def row(number, kind, *, patch_chars=80):
    """Rows that drop out at a step are sound for all steps before it, and broken for some after it."""
    rng = random.Random(number)
    repo = rng.choice(EVALUATION if kind == "evaluated" else _OWNED)
    mirror = f"swesmith/{repo.replace('/', '__')}.{rng.getrandbits(32):08x}"
    num_tests = 201 if kind in ("many", "empty") else rng.randrange(1, 30)
    return {
        "instance_id": f"{mirror.partition('/')[2]}.func_pm__{number:06d}",
        "repo": mirror,
        "patch": "diff --git a/x.py b/x.py\n" + rng.randbytes(patch_chars // 2).hex(),
        "FAIL_TO_PASS": ["tests/test_x.py::test_0"],
        "PASS_TO_PASS": ["t"] * num_tests,
        "image_name": "swesmith.x86_64.x",
        "problem_statement": rng.choice(["", " \n", None]) if kind == "empty" else f"Case {number} gives a wrong sum.",
        "created_at": "2025-01-01",
    }


def owner(row):
    """Owner and name of its repository."""
    return row["repo"].partition("/")[2].rpartition(".")[0]


def successes(number, kind):
    """Of the probe's rollouts."""
    return {"always": ROLLOUTS, "never": 0}.get(kind, 1 + number % (ROLLOUTS - 1))


def write_table(folder, *, patch_chars=80):
    """Rows, the branches that exist, and what a probe saw; the last in another order."""
    seen = []
    with (folder / "rows.jsonl").open("w") as rows, (folder / "branches.txt").open("w") as branches:
        for number, kind in enumerate(kinds()):
            made = row(number, kind, patch_chars=patch_chars)
            rows.write(json.dumps(made) + "\n")
            if kind not in ("missing", "empty"):
                branches.write(f"{number:040x}\trefs/heads/{made['instance_id']}\n")
            if kind in ("always", "mixed", "never"):
                seen.append({"id": made["instance_id"], "rollouts": ROLLOUTS, "successes": successes(number, kind)})
    random.Random(1).shuffle(seen)
    (folder / "probes.jsonl").write_text("".join(json.dumps(each) + "\n" for each in seen))


CURATION = """
name = "paper"
input = ["rows.jsonl"]
[[steps]]
kind = "not_empty"
[[steps]]
kind = "has_ref"
refs = "branches.txt"
[[steps]]
kind = "at_most"
max = 200
[[steps]]
kind = "decontaminate"
repos = ["django/django", "sympy__sympy", "https://github.com/pallets/flask"]
[[steps]]
kind = "probe"
results = "probes.jsonl"
[[steps]]
kind = "select"
unsolved = 1000
[[steps]]
kind = "split"
heldout = 0.1
"""
