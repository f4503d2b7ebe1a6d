"""What the pool costs beside computing: hand-over, cold start, memory, timing. `make targets` measures them."""
