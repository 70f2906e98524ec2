"""A very small model, agent and task, so that a test can train through all parts within a minute."""
