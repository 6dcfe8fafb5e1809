"""Bring what a user calls a model into memory as a module: `hub` finds the folder, `loading` reads and checks it.

Imports the configuration and the kernels' errors; knows nothing of the engine.
"""
