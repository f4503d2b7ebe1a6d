"""VAE decode, here or with its tiles over the workers."""
