"""A coding agent of LangGraph with one tool; it runs in that library's own environment."""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

import os
import subprocess
import sys

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

INSTRUCTIONS = "You are a coding agent. Do the task in the current folder with the shell tool, then say what you did."


@tool
def shell(command: str) -> str:
    """Run a shell command in the current folder and return its output."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


model = ChatOpenAI(model=os.environ["MANEGE_MODEL"]).bind_tools([shell])


def think(state: MessagesState) -> dict:
    """One model call on all that was said."""
    return {"messages": [model.invoke([SystemMessage(INSTRUCTIONS), *state["messages"]])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([shell]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
result = graph.compile().invoke({"messages": [("user", sys.argv[1])]}, {"recursion_limit": 100})
sys.stdout.write(f"{result['messages'][-1].content}\n")
