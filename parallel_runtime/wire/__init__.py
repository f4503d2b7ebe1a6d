"""What lies between the parent and its ranks: messages (protocol.py), sockets and shared memory (channel.py)."""
