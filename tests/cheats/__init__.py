"""Scripted cheats against a local coding task: what each of them gains without guards, with one, and with all.

`routes` are the cheats, `place` the project, its history, its index and its environment, `judges` two scorers, `cells`
runs a cheat under guards, and `python -m tests.cheats` measures the table of docs/study/reward-hacking.md.
"""
