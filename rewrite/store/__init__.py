"""Artefacts: folders ``NAME.hcx``, written, read back and verified."""
