"""Runnable training scripts: the first thing a user runs."""
