"""A search service of its own process: a corpus of passages, an index of it on disk, and HTTP.

    python -m manege.recipes.search.retrieval --corpus wiki.jsonl.zst

`corpus` reads the files, `passages` keeps their text on disk, `bm25` and `dense` rank, `cache` builds an index once per
content and opens it again, `service` answers. Agents reach it as they reach any tool: by its address.
"""
