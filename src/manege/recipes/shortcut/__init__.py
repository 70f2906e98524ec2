"""shortcut: the finder's task, with the solution left where an agent can dig it up instead of solving the task."""
