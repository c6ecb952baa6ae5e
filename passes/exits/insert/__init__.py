"""What exits put into a graph: places, heads, scores, gates, the selection, branches."""
