"""A coding agent of smolagents: it acts by Python code, with one tool; it runs in that library's own environment."""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

import os
import subprocess
import sys

from smolagents import CodeAgent, OpenAIServerModel, tool


@tool
def shell(command: str) -> str:
    """Run a shell command in the current folder and return its output.

    Args:
        command: What to run.
    """
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


model = OpenAIServerModel(
    model_id=os.environ["MANEGE_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = CodeAgent(tools=[shell], model=model, max_steps=30)
sys.stdout.write(f"{agent.run(sys.argv[1])}\n")
