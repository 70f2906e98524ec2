"""What runs around the programs inside a Job: POSIX shell, since images hold little else. Pure.

An agent is an init container, so that every process of it is dead before the scorer begins; as one that fails would
keep the scorer from running, its script says how it ended in the termination message and succeeds. The agent can write
that message, too: no reward depends on it. The scorer works on what the agent left and trusts nothing of it: what is
restored and what was hidden is put into real folders, whatever links the agent planted there.
"""

import shlex
from collections.abc import Mapping, Sequence

__all__ = ["CHANNEL", "MESSAGE", "agent_script", "prepare_script", "scorer_script"]

MESSAGE = "/dev/termination-log"
"""Whose first 4096 bytes become part of the pod's status."""
CHANNEL = 3
"""The descriptor that a scorer may answer by."""

_PLACE = """\
place() {
  at=. rest=$2
  while case $rest in */*) true ;; *) false ;; esac; do
    at=$at/${rest%%/*} rest=${rest#*/}
    if [ -L "$at" ] || [ ! -d "$at" ]; then rm -rf "$at" && mkdir "$at" || exit 125; fi
  done
  rm -rf "$at/$rest" && cp "-R${3:-P}" "$1" "$at/$rest" || exit 125
}
"""
"""Copies $1 to the path $2 below the current folder; what it is a link to, with the third argument L."""


def agent_script(run_s: float) -> str:
    """For `sh -c SCRIPT sh COMMAND...`: kills the agent after its time."""
    return _timed(run_s) + f"""printf '{{"exit_code": %d}}' "$code" > {MESSAGE}\nexit 0\n"""


def prepare_script(workspace: str, *, source: str | None, pristine: str | None) -> str:
    """Fill the workspace from a folder of the image, take every `.git` out of it, and keep a copy of it all for the
    scorer."""
    lines = ["set -e"]
    if source is not None:
        lines.append(f"cp -RP {shlex.quote(source)}/. {shlex.quote(workspace)}/")
    lines.append(f"find {shlex.quote(workspace)} -name .git -prune -exec rm -rf {{}} +")
    if pristine is not None:
        lines.append(f"cp -RP {shlex.quote(workspace)}/. {shlex.quote(pristine)}/")
    return "\n".join(lines) + "\n"


def scorer_script(
    workspace: str,
    *,
    score_s: float,
    restore: Sequence[str] = (),
    pristine: str | None = None,
    files: Mapping[str, str] | None = None,
    stdin: str,
    has_channel: bool,
) -> str:
    """For `sh -c SCRIPT sh COMMAND...`: restore the paths that the globs match, bring `files` (path below the workspace
    to where its content lies), run the scorer, and make the last line that it prints the message; with `has_channel`,
    the last one that it writes to the descriptor CHANNEL."""
    script = f"cd {shlex.quote(workspace)} || exit 125\n{_PLACE}"
    if restore and pristine is not None:
        matched = _matches(restore)
        script += f"find . -depth {matched} ! -type d -exec rm -f {{}} + || exit 125\n"
        script += f"(cd {shlex.quote(pristine)} && find . {matched} ! -type d) | while IFS= read -r path; do\n"
        script += f'  place {shlex.quote(pristine)}/"$path" "${{path#./}}"\ndone || exit 125\n'
    for path, content in (files or {}).items():
        script += f"place {shlex.quote(content)} {shlex.quote(path)} L\n"  # a Secret's files are links
    out, verdict = "/tmp/manege-printed", "/tmp/manege-verdict"
    channel = f"{CHANNEL}> {verdict} " if has_channel else ""
    script += f"cd /\n{_timed(score_s, f'< {shlex.quote(stdin)} > {out} {channel}')}cat {out}\n"
    return script + f"""grep . {verdict if has_channel else out} | tail -n 1 > {MESSAGE}\nexit "$code"\n"""


def _timed(seconds: float, redirected: str = "") -> str:
    return (
        f'"$@" {redirected}&\nprogram=$!\n'
        f'(sleep {seconds:g}; kill -9 "$program") > /dev/null 2>&1 &\nwait "$program"\ncode=$?\n'
    )


def _matches(globs: Sequence[str]) -> str:
    """As a condition of `find`, whose `*` also matches a slash: rather too much is restored than too little. A link
    where a folder was is matched, too."""
    conditions: list[str] = []
    for glob in globs:
        for path in dict.fromkeys((glob, glob.removeprefix("**/"), glob.replace("/**/", "/"))):
            found = path.replace("**", "*")
            conditions += [f"-path {shlex.quote(f'./{each}')}" for each in (found, f"{found}/*")]
        if glob.endswith("/**"):
            conditions.append(f"-path {shlex.quote(f'./{glob[:-3]}')} -type l")
    return f"\\( {' -o '.join(conditions)} \\)"
