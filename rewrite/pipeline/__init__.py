"""What a pass is, what it plans and promises, and how several follow each other."""
