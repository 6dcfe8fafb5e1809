"""Give the trainer log-probabilities instead of logits, made part by part: its side of a bound model.

`training` is the call, `logprob_request` what it asks of the model, `logprob_head` how the head answers.
"""
