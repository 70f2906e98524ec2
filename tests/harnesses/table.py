"""The harnesses as rows: how the scripted policy acts in each, and what a rollout of each must look like."""

from dataclasses import dataclass, field

from tests.harnesses.policy import Shell, tool_call


@dataclass(frozen=True, kw_only=True)
class Row:
    shell: Shell
    in_ci: bool = False
    """Whether every change must pass it."""
    side_threads: frozenset[str] = field(default_factory=frozenset)
    """Threads beside the main one."""
    one_sample: bool = True
    """Whether the main thread is one sample; if not, the harness's file says why."""


def command(tool, name="command", **others):
    return Shell(tool=tool, arguments=lambda text: {name: text, **others})


def described(tool, **others):
    return command(tool, description="Runs a command", **others)


def code(command):
    return f"Thought: I run a command.\n<code>\nprint(shell({command!r}))\n</code>"


SUBMIT = tool_call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
FINISH = tool_call("finish", {"message": "Done."})
ANSWER = 'Thought: it is done.\n<code>\nfinal_answer("done")\n</code>'


def lasting(text):
    """On a busy machine Qwen Code loses the output of a command that ends at once."""
    return {"command": f"{text}; sleep 1", "description": "Runs a command", "is_background": False}


ROWS = {
    "mini-swe-agent": Row(
        shell=Shell(tool="bash", arguments=lambda text: {"command": text}, finish=SUBMIT), in_ci=True
    ),
    "claude-code": Row(shell=described("Bash"), in_ci=True),
    "codex": Row(shell=command("exec_command", "cmd"), in_ci=True),
    "opencode": Row(shell=described("bash"), in_ci=True, side_threads=frozenset({"side:title"})),
    "openai-agents": Row(shell=command("shell"), in_ci=True),
    "openhands": Row(shell=Shell(tool="terminal", arguments=lambda text: {"command": text}, finish=FINISH)),
    "openclaw": Row(shell=command("exec")),
    "qwen-code": Row(shell=Shell(tool="run_shell_command", arguments=lasting)),
    "pi": Row(shell=command("bash")),
    "langgraph": Row(shell=command("shell")),
    "pydantic-ai": Row(shell=command("shell")),
    "smolagents": Row(
        shell=Shell(tool="shell", arguments=lambda text: {}, finish=ANSWER, write=code), one_sample=False
    ),
}
