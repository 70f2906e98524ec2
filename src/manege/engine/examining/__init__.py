"""What a server can do for us, found out by asking it: `examine` and its parts."""
