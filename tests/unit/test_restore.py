"""What an agent changed is found in folders and in layers, and a scorer's view has it undone."""

import os
import stat

import pytest

from manege.controller.restore import differences, entries, matches
from manege.controller.view import make_view


def tree(root, files):
    """A folder with these files; None as text: gone (as overlay mounts keep it); a link as ("to", target)."""
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            os.mknod(path, stat.S_IFCHR, 0)
        elif isinstance(text, tuple):
            path.symlink_to(text[1])
        else:
            path.write_text(text)
    return root


def content(layers):
    """Paths and texts of what is seen through layers; of links their targets."""
    found = {}
    for name, places in entries(layers).items():
        if places[0].is_dir() and not places[0].is_symlink():
            found |= {f"{name}/{inner}": text for inner, text in content(places).items()}
        else:
            found[name] = ("to", str(places[0].readlink())) if places[0].is_symlink() else places[0].read_text()
    return found


@pytest.mark.parametrize(
    ("glob", "path", "found"),
    [
        ("tests/**", "tests/a.py", True),
        ("tests/**", "tests/a/b.py", True),
        ("tests/**", "tests", True),
        ("tests", "tests/a/b.py", True),
        ("tests/*.py", "tests/a.py", True),
        ("tests/*.py", "tests/a/b.py", False),
        ("**/conftest.py", "conftest.py", True),
        ("**/conftest.py", "a/b/conftest.py", True),
        ("conftest.py", "a/conftest.py", False),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("a/**/b", "a/x/y/c", False),
    ],
)
def test_globs_mean_paths_and_all_below_them(glob, path, found):
    assert matches(glob, path) is found


BEFORE = {"calc.py": "1", "tests/a.py": "a", "tests/b.py": "b", "tests/deep/c.py": "c", "data/d": "d"}
CHANGES = {
    "changed": ({"tests/a.py": "bad"}, [], ["tests/a.py"]),
    "same size": ({"tests/a.py": "b"}, [], ["tests/a.py"]),
    "gone": ({}, ["tests/b.py"], ["tests/b.py"]),
    "folder gone": ({}, ["tests/deep"], ["tests/deep"]),
    "new": ({"tests/new.py": "n"}, [], ["tests/new.py"]),
    "new folder": ({"tests/new/x/y.py": "n"}, [], ["tests/new"]),
    "conftest": (
        {"data/conftest.py": "n", "data/more/conftest.py": "n"},
        [],
        ["data/conftest.py", "data/more/conftest.py"],
    ),
    "link for a file": ({"tests/a.py": ("to", "/etc/passwd")}, ["tests/a.py"], ["tests/a.py"]),
    "link for a folder": ({"tests": ("to", "data")}, ["tests"], ["tests"]),
    "folder for a file": ({"tests/a.py/b": "b"}, ["tests/a.py"], ["tests/a.py"]),
    "not meant": ({"calc.py": "2", "data/e": "e"}, ["data/d"], []),
    "compiled": ({"tests/__pycache__/a.cpython-311.pyc": "x"}, [], ["tests/__pycache__"]),
    "all": ({}, ["tests"], ["tests"]),
}
GLOBS = ["tests/**", "**/conftest.py"]


def undone(new, removed):
    """What a scorer sees."""
    after = {path: text for path, text in BEFORE.items() if not any(f"{path}/".startswith(f"{r}/") for r in removed)}
    after |= {path: text for path, text in new.items() if not any(matches(glob, path) for glob in GLOBS)}
    return after | {path: text for path, text in BEFORE.items() if path.startswith("tests/")}


@pytest.mark.parametrize("as_layers", [True, False], ids=["layers", "folder"])
@pytest.mark.parametrize(("new", "removed", "changed"), CHANGES.values(), ids=CHANGES)
def test_what_was_changed_is_found_and_undone_in_the_view_alone(tmp_path, new, removed, changed, as_layers):
    pristine = tree(tmp_path / "pristine", BEFORE)
    if as_layers:
        gone = {path: None for path in removed if path not in new and not any(n.startswith(f"{path}/") for n in new)}
        finished = [tree(tmp_path / "upper", gone | new), pristine]
    else:
        kept = {
            p: t for p, t in BEFORE.items() if p not in new and not any(f"{p}/".startswith(f"{r}/") for r in removed)
        }
        finished = [tree(tmp_path / "left", kept | new)]
    before = content(finished)
    assert [found.path for found in differences(finished, [pristine], GLOBS)] == changed
    own = tmp_path / "own"
    own.mkdir()
    place = tmp_path if as_layers else None
    view = make_view(own, finished, [pristine], place=place, restore=GLOBS, files={})
    seen = [own / "upper", *finished] if as_layers else [view.place]
    assert content(seen) == undone(new, removed)
    assert view.changed == [path for path in changed if "__pycache__" not in path]
    assert (content(finished), content([pristine])) == (before, BEFORE)


@pytest.mark.parametrize("as_layers", [True, False], ids=["layers", "folder"])
@pytest.mark.parametrize(
    "planted",
    [
        {},
        {"tests/hidden.py": "mine"},
        {"tests/hidden.py": ("to", "../../victim")},
        {"tests": ("to", "../victim")},
        {"tests/hidden.py/x": "a folder"},
        {"tests": "a file"},
        {"tests/__pycache__/hidden.cpython-311.pyc": "compiled"},
        {"tests/conftest.py": "planted"},
    ],
    ids=["nothing", "file", "link", "link above", "folder", "file above", "compiled", "beside"],
)
def test_hidden_files_are_written_where_they_belong_whatever_is_planted(tmp_path, planted, as_layers):
    victim = tree(tmp_path / "victim", {"hidden.py": "victim"})
    left = tree(tmp_path / "left", planted)
    own = tmp_path / "own"
    own.mkdir()
    place = tmp_path if as_layers else None
    files = {"tests/hidden.py": "hidden", "tests/more/other.py": "other"}
    view = make_view(own, [left], [], place=place, restore=["tests/**"], files=files)
    seen = content([own / "upper", left] if as_layers else [view.place])
    assert seen == files
    assert (content([victim]), content([left])) == (
        {"hidden.py": "victim"},
        content([tree(tmp_path / "again", planted)]),
    )


def test_a_locked_folder_hides_nothing(tmp_path):
    pristine = tree(tmp_path / "pristine", {"tests/a.py": "a"})
    left = tree(tmp_path / "left", {"tests/a.py": "a", "tests/locked/conftest.py": "planted"})
    (left / "tests" / "locked").chmod(0)
    (left / "tests").chmod(0)
    assert [found.path for found in differences([left], [pristine], ["tests/**"])] == ["tests/locked"]


def test_pipes_and_sockets_are_no_part_of_a_copy(tmp_path):
    left = tree(tmp_path / "left", {"a": "a"})
    os.mkfifo(left / "pipe")
    own = tmp_path / "own"
    own.mkdir()
    assert content([make_view(own, [left], [], place=None, restore=[], files={}).place]) == {"a": "a"}
