"""What the panel shows and does: state, routes, progress, reports, further machines."""
