"""verl's training engine with samebit's forward and log-probabilities."""
