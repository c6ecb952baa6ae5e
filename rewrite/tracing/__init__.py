"""An eager model becomes a graph, and the graph must give what eager gives."""
