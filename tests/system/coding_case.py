"""Two bugs of a small real package, as rows; the package is prepared once per machine."""

from manege.recipes.coding import patches
from manege.recipes.coding.packages import select
from manege.recipes.coding.places import Places, default_folder
from manege.recipes.coding.prepare import prepare
from manege.recipes.coding.tasks import to_task

(PACKAGE,) = select(["inflection"])
MODULE = "inflection/__init__.py"
RIGHT = "lambda m: m.group(1).upper(), string)"
BUG = "lambda m: m.group(0).upper(), string)"
OTHER_RIGHT = 'word = word.replace("-", "_")'
OTHER_BUG = 'word = word.replace("_", "-")'
FAILING = [
    "test_inflection.py::test_camelize[SpecialGuest-special_guest]",
    "test_inflection.py::test_camelize_with_underscores",
]
PASSING = [
    "test_inflection.py::test_camelize[Product-product]",
    "test_inflection.py::test_ordinal[1-1st]",
    "test_inflection.py::test_humanize[underground-Underground]",
]


def prepared():
    places = Places(default_folder())
    prepare(PACKAGE, places)
    return places


def task_of(places, right=RIGHT, bug=BUG, failing=FAILING, passing=PASSING):
    before = (places.source(PACKAGE.name) / MODULE).read_text()
    row = {
        "instance_id": f"{PACKAGE.release}.constant__{len(bug)}",
        "repo": f"pypi/{PACKAGE.release}",
        "patch": patches.make(MODULE, before, before.replace(right, bug)),
        "FAIL_TO_PASS": failing,
        "PASS_TO_PASS": passing,
        "image_name": "",
        "problem_statement": "camelize is broken",
        "created_at": "2020-08-22T15:32:57Z",
    }
    return to_task(row, PACKAGE, places)
