"""A coding agent of Pydantic AI with one tool; it runs in that library's own environment."""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

import os
import subprocess
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

INSTRUCTIONS = "You are a coding agent. Do the task in the current folder with the shell tool, then say what you did."

agent = Agent(OpenAIChatModel(os.environ["MANEGE_MODEL"]), instructions=INSTRUCTIONS)


@agent.tool_plain
def shell(command: str) -> str:
    """Run a shell command in the current folder and return its output."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


result = agent.run_sync(sys.argv[1])
sys.stdout.write(f"{result.output}\n")
