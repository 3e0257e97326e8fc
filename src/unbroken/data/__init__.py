"""Loaders that resume exactly: which sample comes next, and with which random augmentation."""

from unbroken.data.loader import ResumableLoader, resumable

__all__ = ["ResumableLoader", "resumable"]
