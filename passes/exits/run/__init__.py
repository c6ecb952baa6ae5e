"""Running models with exits so that what follows an exit is not computed."""
