"""finder: an agent with a shell follows pointers from file to file and reports a value."""
