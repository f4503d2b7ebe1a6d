"""What a rank runs: models, and the specs by which they share their tokens."""
