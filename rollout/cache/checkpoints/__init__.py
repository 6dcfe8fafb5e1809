"""Manage checkpoints of recurrent states (Mamba layers): the pool of slots, and the policy that says where one is
taken."""
