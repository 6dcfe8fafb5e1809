"""Say what images are to a model (`image_layout`), and what a call with some of them reads (`image_rows`).

Imports nothing of the other rooms.
"""
