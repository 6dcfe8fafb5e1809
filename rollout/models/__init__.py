"""From what a user calls a model to a module in memory: `hub` finds the folder, `loading` reads and checks it.

Imports the configuration and the kernels' errors; knows nothing of the engine.
"""
