"""hcx package."""
