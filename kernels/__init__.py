"""Packed formats' arithmetic: what the bytes mean, and the code that writes and reads them.

This room knows nothing of Hydra, pluggy, transformers or models.
"""
