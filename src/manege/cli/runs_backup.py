"""Copy a run's database, with all runs in it, while it is in use; and, of a run folder, config and metrics.

The copy of a folder or of a database file is a run folder. Of a server's database it is an archive for pg_restore.
"""

import argparse
import json
import shutil
from pathlib import Path

from manege.cli.places import STORE, Place, find_place, opened, read_config
from manege.errors import ConfigError

_ARCHIVE = "manege.dump"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this action."""
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("target", metavar="TARGET", type=Path, help="a folder, made new")


async def execute(arguments: argparse.Namespace) -> int:
    """Say what was copied."""
    place, target = find_place(arguments.run), arguments.target
    copy = target / (_ARCHIVE if "://" in str(place.store) and not str(place.store).startswith("sqlite") else STORE)
    async with opened(place) as reader:
        try:
            target.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"{target} must be a new folder: {error}") from error
        await reader.backup(copy)
        runs = await reader.run_ids()
    _copy_records(place, target)
    for path in sorted(target.iterdir()):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    print(f"runs: {', '.join(runs) or 'none yet'}; agents' logs, checkpoints and models are not copied")
    if copy.name == _ARCHIVE:
        print(f"restore it with: pg_restore --clean --if-exists --dbname=URL {copy}")
    return 0


def _copy_records(place: Place, target: Path) -> None:
    """The copied config names no other store: the copy is one."""
    if place.folder is None:
        return
    if config := read_config(place.folder):
        config["gateway"]["store"] = None
        (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if (metrics := place.folder / "metrics.jsonl").exists():
        shutil.copy(metrics, target)
