"""Asks the model the prompt in PROMPT, once, and prints its answer."""

import os
import sys

from openai import OpenAI


def main() -> None:
    """One call."""
    completion = OpenAI().chat.completions.create(
        model="default", messages=[{"role": "user", "content": os.environ["PROMPT"]}]
    )
    sys.stdout.write(completion.choices[0].message.content or "")


if __name__ == "__main__":
    main()
