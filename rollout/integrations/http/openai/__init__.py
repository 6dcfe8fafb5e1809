"""Serve OpenAI's endpoints: `routes` first, then `completions` and `chat`.

What may be asked is in `requests`, `prompts` and `sampling`; what is answered in `answers`, `logprobs` and
`sample_text`; what a conversation needs in `tools`, `forced_calls` and `sessions`. Imports the modules of `http`, and
of `samebit.rollout` the `requests`, `structured_outputs`, outputs, parameters and errors.
"""
