"""What a rank runs: models, and the plans by which they share their tokens."""
