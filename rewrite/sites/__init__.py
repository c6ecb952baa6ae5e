"""What a graph is made of: residual streams, branches, blocks, stacks, stages, weights."""
