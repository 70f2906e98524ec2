"""Agents, tasks and scorers that are ready to train."""
