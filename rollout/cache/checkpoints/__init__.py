"""Manage checkpoints of recurrent states: the `pool` of slots, and the `policy` that says where one is taken.

`leaving_points` finds where prompts that wait will want one. Imports `requests` and, of `cache`, what holds blocks.
"""
