"""The search agent on LangGraph; it runs in that library's own environment."""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

import os

from agent import WITH_TOOLS, search
from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

find = tool("search", description="Find passages of the corpus.")(search)
model = ChatOpenAI(model="default").bind_tools([find])


def think(state: MessagesState) -> dict:
    """One model call on all that was said."""
    return {"messages": [model.invoke([SystemMessage(WITH_TOOLS), *state["messages"]])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([find]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
result = graph.compile().invoke({"messages": [("user", os.environ["QUESTION"])]}, {"recursion_limit": 14})
print(" ".join(str(result["messages"][-1].content).split()))
