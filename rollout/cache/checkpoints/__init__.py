"""Manage checkpoints of recurrent states: the pool of slots, and the policy that says where one is taken."""
