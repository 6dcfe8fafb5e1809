"""Give the trainer log-probabilities instead of logits, made part by part: its side of a bound model.

The way through: `training` is the call, `logprob_request` what it asks of the model, `logprob_head` how the head
answers. Imports `ops`, `layout` and, of `binding`, `binding`, `epilogue`, `vision` and `wrapped`.
"""
