"""Two Programs beside each other."""
