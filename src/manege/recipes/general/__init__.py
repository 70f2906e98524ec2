"""general: an agent with a computer works on files; families of tasks with verifiable outcomes, and IFEval."""
