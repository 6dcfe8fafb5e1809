"""Constrain what a sample may be: to a JSON schema, a regular expression, a list of choices, or a grammar.

The way through: `params` is what a caller asks for, `grammars` compiles it at submission, and `matching` follows a
sample through its grammar and says which tokens may come next. The library that knows grammars, llguidance, is loaded
by the first request that asks. Near the ground of `samebit.rollout`: imports `errors`, `checks` and
`samebit.kernels.layout`.
"""
