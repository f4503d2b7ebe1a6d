"""The same graph with the stock loader and with ours: every kind of graph, every kind of plan."""
