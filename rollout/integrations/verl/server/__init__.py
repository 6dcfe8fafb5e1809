"""verl's rollout servers: the actor with the worker, and the trainer's ends of it."""
