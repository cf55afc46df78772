"""Built-in quantizers, one a file, and what they share: codebooks and bit allocation."""
