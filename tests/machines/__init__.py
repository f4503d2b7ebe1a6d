"""Several machines: who may join, what a joined machine runs, and that none of it stays behind."""
