"""Does mismatch matter? GRPO with samplers that differ from the trainer by known amounts, and what a loss can do.

`arms` names the runs; `samplers` makes the worker of each; `study` is the program; `figure` draws what it wrote.
"""
