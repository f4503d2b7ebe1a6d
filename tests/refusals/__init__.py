"""What a parallel MODEL cannot take: graphs that show it, and the messages a user gets."""
