"""Rollouts as files and back: JSON lines, and Parquet with a row per call. Pure conversion: no database, no sockets."""
