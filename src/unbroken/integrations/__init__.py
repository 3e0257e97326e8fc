"""Adapters for training frameworks; none is imported unless it is used."""
