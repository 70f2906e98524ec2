"""What the pages tell people to type is understood: commands by the parser, files by what reads them. Nothing runs."""

import argparse
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from manege.cli.main import make_parser
from manege.config import load_config, parse_config
from manege.curation.config import CurationConfig
from manege.harnesses.harness import parse

ROOT = Path(__file__).parents[2]
RUN_FILE = ROOT / "tests/tiny/run.toml"
PARSER = make_parser()
PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "docs/quickstart.md", "docs/guides/*.md", "docs/concepts/*.md", "src/**/README.md")
    for path in sorted(ROOT.glob(pattern))
]
FENCED = re.compile(r"^([ ]*)```(\w*)\n(.*?)^\1```$", re.M | re.S)
TYPED = re.compile(r"^[ ]*(?:\$ )?(?:\w+=\S* )*(?:[\w./-]*/)?manege ((?!\w+ \S+: )[a-z]+(?: .*)?)$", re.M)
MENTIONED = re.compile(r"`manege ([a-z]+(?: [^`]*)?)`")


def typed(text):
    """Command lines in blocks; `manege train NAME: ...` is what one has printed."""
    for _, _, body in FENCED.findall(text):
        for line in TYPED.findall(body.replace("\\\n", " ")):
            yield re.split(r" (?:[|>&;]|&&|2>)", line)[0]


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_are_of_our_parser(page, capsys):
    for line in typed((ROOT / page).read_text(encoding="utf-8")):
        words = shlex.split(line, comments=True)
        try:
            arguments, rest = PARSER.parse_known_args(words)
        except SystemExit:
            pytest.fail(f"{page}: manege {line}: {capsys.readouterr().err}")
        overrides = [*getattr(arguments, "overrides", []), *rest]
        assert all(re.match(r"\w[\w.]*=", word) for word in overrides), f"{page}: manege {line}"
        run_file = getattr(arguments, "run_file", None)
        if run_file and (ROOT / run_file).is_file():
            load_config(ROOT / run_file, overrides, quick=arguments.quick)


@pytest.mark.parametrize("page", PAGES)
def test_verbs_and_options_that_are_mentioned_exist(page):
    for line in MENTIONED.findall(FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))):
        parser, options = PARSER, set()
        for word in line.split():
            [verbs] = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)] or [{}]
            parser = verbs.get(word, parser)
            options |= set(parser._option_string_actions)
            assert not word.startswith("--") or word.split("=")[0] in options, f"{page}: manege {line}"
        assert parser.prog != "manege", f"{page}: manege {line}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/guides/")])
def test_files_are_read(page):
    """Of a run (a part of one, put into another), of a harness, of a curation."""
    for _, language, block in FENCED.findall((ROOT / page).read_text(encoding="utf-8")):
        if language != "toml":
            continue
        told = tomllib.loads(block)
        if "title" in told:
            parse("of-a-page", block)
        elif "steps" in told:
            CurationConfig.model_validate(told)
        else:
            tree = tomllib.loads(RUN_FILE.read_text(encoding="utf-8"))
            for name, section in told.items():
                tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
            if "harness" in tree["agent"]:
                del tree["agent"]["run"]
            parse_config(tree, source=page)
