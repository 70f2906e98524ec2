"""The default agent of the OpenHands SDK, with its own tools, on the current folder; it runs in that library's own
environment."""
# pyright: reportMissingImports=false

import os
import sys

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent
from pydantic import SecretStr

llm = LLM(
    model=f"openai/{os.environ['MANEGE_MODEL']}",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
    usage_id="agent",
)
conversation = Conversation(agent=get_default_agent(llm=llm, cli_mode=True), workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
