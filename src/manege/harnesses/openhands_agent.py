"""The default agent of the OpenHands SDK, with its own tools, on the current folder; it runs in that library's own
environment. Its terminal is the one of plain processes: tmux needs Unix sockets, which agents do not get."""
# pyright: reportMissingImports=false

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.preset.default import get_default_condenser, get_default_tools
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

llm = LLM(
    model=f"openai/{os.environ['MANEGE_MODEL']}",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
    usage_id="agent",
)
terminal = Tool(name=TerminalTool.name, params={"terminal_type": "subprocess"})
agent = Agent(
    llm=llm,
    tools=[terminal if tool.name == TerminalTool.name else tool for tool in get_default_tools(enable_browser=False)],
    system_prompt_kwargs={"cli_mode": True},
    condenser=get_default_condenser(llm.model_copy(update={"usage_id": "condenser"})),
)
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
