"""Put the worker into other systems. Each package needs that system to be installed, and is imported by name."""
