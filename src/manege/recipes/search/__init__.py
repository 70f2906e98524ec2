"""search: an agent answers questions of several hops by a search service over a corpus."""
