"""Bring what a user calls a model into memory as a module: `hub` finds the folder, `loading` reads and checks it;
`saving` writes one.

`kinds` says whether text alone is read, by its `text_config`, or the whole. `own_reading` builds a module without
transformers' reading; `tokenizers` reads what turns ids into text. `draft` makes of a folder what guesses tokens: it
alone knows of `engine`, `cache` and `runner`. Imports `config`, `errors`, `requests` for end tokens,
`samebit.weight_sync`, and `binding` of `samebit.kernels` for what it refuses.
"""
