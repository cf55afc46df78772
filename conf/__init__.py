"""Hydra configuration files of the ``kvbench`` application."""
