"""Changing a graph: every edit of a pass goes through the editor."""
