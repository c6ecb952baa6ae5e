"""The graph as a value: the Program that passes see, its signature, its tensors, and questions about them. No verbs."""
