"""Which mounts a root takes, as a table."""

import pytest

from manege.sandbox.root import Access, plan, resolve

READ, WRITE, HIDE = Access.READ, Access.WRITE, Access.HIDE


@pytest.mark.parametrize(
    ("readable", "writable", "hidden", "places"),
    [
        (["/a/b", "/a", "/a-b"], {}, [], [("/a", READ, None), ("/a-b", READ, None)]),
        (["/a"], {"/a/w": "/a/w"}, [], [("/a", READ, None), ("/a/w", WRITE, READ)]),
        (["/w/a"], {"/w": "/w", "/w/b": "/w/b"}, [], [("/w", WRITE, None)]),
        (["/a"], {}, ["/a/h", "/z"], [("/a", READ, None), ("/a/h", HIDE, READ)]),
        (
            ["/a", "/a/h/b"],
            {"/a/h/w": "/a/h/w"},
            ["/a/h", "/a/h/i"],
            [("/a", READ, None), ("/a/h", HIDE, READ), ("/a/h/b", READ, HIDE), ("/a/h/w", WRITE, HIDE)],
        ),
        (["/h"], {}, ["/h"], []),
        ([], {"/h": "/h"}, ["/h"], [("/h", WRITE, None)]),
        ([], {"/tmp": "/s", "/tmp/w": "/tmp/w"}, [], [("/tmp", WRITE, None), ("/tmp/w", WRITE, WRITE)]),
        (["/tmp/r"], {"/tmp": "/s"}, ["/tmp/h", "/s/h"], [("/tmp", WRITE, None), ("/tmp/r", READ, WRITE)]),
        ([], {"/w": "/w"}, ["/w/h"], [("/w", WRITE, None), ("/w/h", HIDE, WRITE)]),
    ],
    ids=[
        "what is shown needs no mount",
        "to write in what is read",
        "what is writable is readable",
        "hidden where it would be shown",
        "shown inside hidden",
        "hidden beats readable",
        "writable beats hidden",
        "another folder's place shows other things",
        "and hides them",
        "hidden in what is writable",
    ],
)
def test_the_mounts_are_few_and_in_order(readable, writable, hidden, places):
    found = plan(readable=readable, writable=writable, hidden=hidden)
    assert [(place.path, place.access, place.above) for place in found] == places
    assert {place.path: place.source for place in found if place.access is WRITE}.items() <= writable.items()


def test_links_on_the_way_are_kept(tmp_path):
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "real" / "deep" / "file").touch()
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "relative").symlink_to("deep")
    real, links = resolve(f"{tmp_path}/absolute/relative/file")
    assert real == f"{tmp_path}/real/deep/file"
    assert links == {f"{tmp_path}/absolute": f"{tmp_path}/real", f"{tmp_path}/real/relative": "deep"}
    assert resolve(real) == (real, {})
