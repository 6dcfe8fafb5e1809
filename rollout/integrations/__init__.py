"""The worker in other systems. Each package needs that system to be installed, and is imported by name."""
