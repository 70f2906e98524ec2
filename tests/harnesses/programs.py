"""Setup and scorer of the coding task."""


def prepare(task, workspace):
    (workspace / "words.txt").write_text("".join(f"{word}\n" for word in task.hidden["words"]))


def score(task, attempt):
    first, second, third = task.hidden["words"]
    words = attempt.workspace / "words.txt"
    count = attempt.workspace / "count.txt"
    edited = words.read_text() == f"{first}\n{second.upper()}\n{third}\n"
    counted = count.exists() and count.read_text().strip() == "3"
    return float(edited and counted)
