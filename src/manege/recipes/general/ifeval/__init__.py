"""IFEval: instructions whose following a program can check (https://arxiv.org/abs/2311.07911)."""
