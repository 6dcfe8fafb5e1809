"""Notice what a trainer writes to the weights of a module in place: `watch` tells whether, at every step; `marks` tell
which, and `changes` reports it as an update. Imports `manifest`, `report` and `digest`.
"""
