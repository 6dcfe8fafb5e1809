"""The trainer's side of a bound model: log-probabilities instead of logits, made part by part.

`training` is the call, `logprob_request` what it asks of the model, `logprob_head` how the head answers.
"""
