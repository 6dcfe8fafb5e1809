"""Hold what a request is: its parameters checked, its sequences, the names of its blocks, when a sample ends, and how
callers wait for that.

The way through: `request`, whose samples have `shared` in common, with the `version_history` of its tokens, then
`limits` (can it be served?), `stopping`, which asks `stop_strings`, whose texts come from `tokenizer`, and
`block_digests`; `ending` is what callers wait for. A `prompt_with_images` has its `images` checked by `limits`.
Near the ground of `samebit.rollout`: imports `checks`, `errors`, `guard`, `sampling_params`, `structured_outputs`,
`keys` and `samebit.kernels.layout`.
"""
