"""The conformance suite of all engines."""
