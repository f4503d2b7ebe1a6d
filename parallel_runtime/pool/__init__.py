"""The parent's side: starting ranks, asking them, watching them, ending them."""
