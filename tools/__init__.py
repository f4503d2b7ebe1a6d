"""What writes the project's own pages, templates and records; users do not get it."""
