"""From older schemas to the newest one, forwards only: one file per schema in `versions/`."""
