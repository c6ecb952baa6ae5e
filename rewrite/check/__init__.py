"""The checks of a rewrite, a file each, and the suite that runs them."""
