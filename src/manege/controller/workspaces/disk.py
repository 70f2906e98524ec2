"""Work on disks in process trees of its own: killed when it is cancelled, and nothing else waits for it.

In: a function of ours with plain arguments, or a command. Out: what it returned or printed. Raises HarnessError with
its own words when it fails.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manege.controller.environment import system_environment
from manege.errors import HarnessError
from manege.sandbox.launcher import Launcher
from manege.sandbox.spec import Exit, Limits, Overlay, ProcessSpec, Program

__all__ = ["Disk", "perform"]

_TAIL_CHARS = 2000
"""Of the output of a command that failed."""


def perform(function: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, Any]:
    """In the process of its own: call the function; what can be foreseen is an answer."""
    try:
        return {"value": function(*arguments)}
    except (HarnessError, OSError) as error:
        return {"error": str(error)}


@dataclass(frozen=True, slots=True)
class Disk:
    """Where such work is started."""

    launcher: Launcher

    async def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        """What a function of a module returns, as JSON can carry it."""
        program = f"{perform.__module__}:{perform.__name__}"
        what = f"{function.__name__} {' '.join(map(str, arguments))}"
        with tempfile.TemporaryDirectory(prefix="manege-") as scratch:
            args = (function, arguments)
            ended, *printed = await self._run(program, scratch=scratch, cwd="/", timeout_s=timeout_s, args=args)
        if ended.reply is None:
            raise HarnessError(f"workspace: {what} {_failure(ended, printed, timeout_s)}")
        answer = json.loads(ended.reply)
        if "error" in answer:
            raise HarnessError(f"workspace: {answer['error']}")
        return answer["value"]

    async def command(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        overlay: Overlay | None = None,
        timeout_s: float,
    ) -> str:
        """What a program of the user's own prints; it is not sandboxed."""
        with tempfile.TemporaryDirectory(prefix="manege-") as scratch:
            ended, *printed = await self._run(
                command, scratch=scratch, cwd=str(cwd), env=env, overlay=overlay, timeout_s=timeout_s
            )
        if ended.code != 0:
            raise HarnessError(f"workspace: {' '.join(command)!r} {_failure(ended, printed, timeout_s)}")
        return printed[0]

    async def _run(
        self,
        program: Program,
        *,
        scratch: str,
        cwd: str,
        env: Mapping[str, str] | None = None,
        overlay: Overlay | None = None,
        timeout_s: float,
        args: Sequence[Any] = (),
    ) -> tuple[Exit, str, str]:
        outputs = [Path(scratch, "stdout.txt"), Path(scratch, "stderr.txt")]
        spec = ProcessSpec(
            program=program,
            role="workspace",
            env={**system_environment(home=str(Path.home()), scratch=scratch), **(env or {})},
            cwd=cwd,
            stdout=str(outputs[0]),
            stderr=str(outputs[1]),
            limits=Limits(),
            policy=None,
            overlay=overlay,
            args=args,
            replies=bool(args),
        )
        ended = await self.launcher.run(spec, timeout_s)
        stdout, stderr = (output.read_text(encoding="utf-8", errors="replace") for output in outputs)
        return ended, stdout, stderr


def _failure(ended: Exit, printed: Sequence[str], timeout_s: float) -> str:
    if ended.timed_out:
        return f"did not end within {timeout_s:g} s (agent.limits.setup_s)"
    return f"failed with {ended.how}: {''.join(printed)[-_TAIL_CHARS:].strip() or 'it printed nothing'}"
