"""Each stands alone: it imports nothing of the code that it brings a database to, since that goes on changing."""
