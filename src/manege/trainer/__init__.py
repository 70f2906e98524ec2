"""The trainer: groups of rollouts in, new weights out."""
