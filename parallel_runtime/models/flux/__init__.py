"""One file a model: what is split and gathered, the config read from shapes, and the pure functions of its blocks."""
