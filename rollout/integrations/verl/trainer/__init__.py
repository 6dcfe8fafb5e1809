"""Hold what runs in verl's trainer: its engine with samebit's forward, and its end of a rollout server."""
