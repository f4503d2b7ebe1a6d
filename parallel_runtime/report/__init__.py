"""The one report of everything that is measured: its schema, and what makes, words and draws it. Measures nothing."""
