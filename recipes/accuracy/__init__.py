"""Teach a small model with latents a task of reasoning-gym, and answer few-shot prompts with the prefix cache on and
off.

`benchmarks/accuracy.py` runs it.
"""
