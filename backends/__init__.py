"""One module for each encoding of segments; the core finds them by entry point."""
