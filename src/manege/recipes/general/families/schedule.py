"""schedule: jobs on a time line, by rules; any plan that keeps them is right.

Levels: 1 three jobs of one worker; 2 five; 3 six, some of which may not begin early; 4 eight of two workers; 5 ten, and
a pause in which nobody works. What was there before, the order of the file, earns nothing.
"""

import csv
import inspect
import io
import itertools
from collections.abc import Mapping

from manege.recipes.general.draw import Draw
from manege.recipes.general.families.problem import PART, Family, Problem
from manege.recipes.general.left import Left
from manege.types import JsonObject

__all__ = ["FAMILY"]

_PLAN = "plan.csv"
_PAUSE = 30
Plan = Mapping[str, tuple[int, int]]
"""Worker and start of each job."""


def make(draw: Draw, level: int) -> Problem:
    """See the module."""
    num_jobs, num_workers = (3, 5, 6, 8, 10)[level - 1], 1 + (level >= 4)
    names = draw.words(num_jobs)
    jobs = [
        {
            "job": name,
            "minutes": draw.between(2, 12) * 5,
            "after": draw.rng.sample(names[:n], min(n, draw.between(1, 2))) if n % 3 or level == 1 else [],
            "from": draw.between(0, 12) * 5 if level >= 3 and draw.rng.random() < 0.5 else 0,
        }
        for n, name in enumerate(names)
    ]
    pause = [60, 60 + _PAUSE] if level == 5 else None
    # The last becomes the first, and it waits for others.
    draw.rng.shuffle(jobs)
    waits = next(n for n, job in enumerate(jobs) if job["after"])
    jobs.insert(0, jobs.pop(waits))
    limit = _end(jobs, _ready_first(jobs, num_workers, pause))
    rows = "".join(f"{job['job']},{job['minutes']},{' '.join(job['after'])},{job['from']}\n" for job in jobs)
    question = (
        "Plan the jobs of jobs.csv. A job takes its minutes, begins when all jobs under `after` have ended, and not "
        f"before the minute `from`. There {'is one worker' if num_workers == 1 else 'are two workers'}, who can do one "
        f"job at a time. {f'Nobody works from minute {pause[0]} to {pause[1]}. ' if pause else ''}"
        f"All must be done by minute {limit}. Write plan.csv, without a header: job,worker,start, for example tea,1,0."
    )
    program = (
        f"import csv\n{inspect.getsource(_ready_first)}"
        "jobs = list(csv.DictReader(open('jobs.csv')))\n"
        "for job in jobs:\n"
        "    job |= {'minutes': int(job['minutes']), 'after': job['after'].split(), 'from': int(job['from'])}\n"
        f"plan = _ready_first(jobs, {num_workers}, {pause})\n"
        "open('plan.csv', 'w').write(''.join(f'{job},{who},{start}\\n' for job, (who, start) in plan.items()))\n"
    )
    return Problem(
        question=question,
        files={"jobs.csv": "job,minutes,after,from\n" + rows},
        hidden={"jobs": jobs, "workers": num_workers, "pause": pause, "limit": limit},
        answers=False,
        solution=f"python3 - <<'END'\n{program}END",
    )


def score(hidden: JsonObject, left: Left) -> float:
    """1 for a plan that keeps all rules; a part for rules that one job after the other, in the order of the file, does
    not keep, if each job is there once and no worker does two at a time."""
    plan = _read(left.text(_PLAN))
    if plan is None or not _possible(hidden, plan):
        return 0.0
    kept = _rules(hidden, plan)
    if all(kept):
        return 1.0
    start, naive = 0, {}
    for job in hidden["jobs"]:
        naive[job["job"]] = (1, start)
        start += job["minutes"]
    gained = [good for good, before in zip(kept, _rules(hidden, naive), strict=True) if not before]
    return PART * sum(gained) / len(gained) if gained else 0.0


def _read(text: str) -> Plan | None:
    plan = {}
    try:
        for name, worker, start in csv.reader(io.StringIO(text)):
            if name in plan:
                return None
            plan[name] = (int(worker), int(start))
    except (ValueError, csv.Error):
        return None
    return plan


def _possible(hidden: JsonObject, plan: Plan) -> bool:
    minutes = {job["job"]: job["minutes"] for job in hidden["jobs"]}
    if set(plan) != set(minutes) or any(start < 0 or not 1 <= who <= hidden["workers"] for who, start in plan.values()):
        return False
    times = sorted((who, start, start + minutes[name]) for name, (who, start) in plan.items())
    return all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(times))


def _rules(hidden: JsonObject, plan: Plan) -> list[bool]:
    """Whether each is kept."""
    kept = []
    ends = {job["job"]: plan[job["job"]][1] + job["minutes"] for job in hidden["jobs"]}
    for job in hidden["jobs"]:
        start = plan[job["job"]][1]
        kept += [ends[before] <= start for before in job["after"]]
        kept.append(start >= job["from"])
        if hidden["pause"]:
            begin, end = hidden["pause"]
            kept.append(start >= end or ends[job["job"]] <= begin)
    return [*kept, max(ends.values()) <= hidden["limit"]]


def _end(jobs: "list[dict]", plan: "dict") -> int:
    return max(plan[job["job"]][1] + job["minutes"] for job in jobs)


def _ready_first(jobs: "list[dict]", num_workers: int, pause: "list[int] | None") -> "dict[str, tuple[int, int]]":
    """A plan that always takes the job which can begin first."""
    free, ends, plan = [0] * num_workers, {}, {}
    while len(plan) < len(jobs):
        choices = []
        for job in jobs:
            if job["job"] in plan or any(before not in plan for before in job["after"]):
                continue
            for worker, at in enumerate(free):
                start = max([at, job["from"], *(ends[before] for before in job["after"])])
                if pause and start < pause[1] and start + job["minutes"] > pause[0]:
                    start = pause[1]
                choices.append((start, -job["minutes"], job["job"], worker))
        start, minus, name, worker = min(choices)
        free[worker] = ends[name] = start - minus
        plan[name] = (worker + 1, start)
    return plan


FAMILY = Family(make=make, score=score)
