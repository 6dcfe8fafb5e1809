"""Run verl's rollout servers: the actor with the worker, its replica, and how weights reach it."""
