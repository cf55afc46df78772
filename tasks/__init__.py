"""Built-in tasks, one a file: what is measured about a quantizer."""
