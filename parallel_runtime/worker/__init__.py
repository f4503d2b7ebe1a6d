"""The worker's side: one process, one device, one rank."""
