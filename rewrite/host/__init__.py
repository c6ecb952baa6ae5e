"""A Program as others want it: an ordinary module, a Transformers model, in another dtype."""
