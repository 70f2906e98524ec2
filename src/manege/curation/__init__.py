"""Which tasks of a table are worth training on: a pipeline of steps over its rows, with counts at each."""
