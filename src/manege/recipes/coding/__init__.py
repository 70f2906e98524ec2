"""coding: an agent repairs a bug in a real package, and the package's own tests judge it."""
