"""Many prompts in one server: what grows."""
