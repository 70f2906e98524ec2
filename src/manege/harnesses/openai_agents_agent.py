"""A coding agent of the OpenAI Agents SDK with one tool; it runs in that library's own environment."""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

import os
import subprocess
import sys

from agents import Agent, Runner, function_tool

INSTRUCTIONS = "You are a coding agent. Do the task in the current folder with the shell tool, then say what you did."


@function_tool
def shell(command: str) -> str:
    """Run a shell command in the current folder and return its output."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


agent = Agent(name="coder", instructions=INSTRUCTIONS, tools=[shell], model=os.environ["MANEGE_MODEL"])
result = Runner.run_sync(agent, sys.argv[1], max_turns=50)
sys.stdout.write(f"{result.final_output}\n")
