"""The search agent on the OpenAI Agents SDK; it runs in that library's own environment."""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

import os

from agent import WITH_TOOLS, search
from agents import Agent, Runner, function_tool, set_tracing_disabled

# Traces would go to OpenAI.
set_tracing_disabled(True)
find = function_tool(search, name_override="search", description_override="Find passages of the corpus.")
agent = Agent(name="searcher", instructions=WITH_TOOLS, tools=[find], model="default")
result = Runner.run_sync(agent, os.environ["QUESTION"], max_turns=6)
print(" ".join(str(result.final_output).split()))
