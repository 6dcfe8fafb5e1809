"""Hold what a request is: its parameters checked, its sequences, the names of its blocks, when a sample ends.

Ground floor of `samebit.rollout`: it imports nothing of the other rooms.
"""
