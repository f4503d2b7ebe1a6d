"""What the pool costs beside computing: hand-over, cold start, memory. `python -m benchmarks.targets` measures them."""
