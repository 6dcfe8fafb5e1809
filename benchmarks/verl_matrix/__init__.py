"""Run verl in many ways, each with a mismatch that must be 0: `make verl-matrix`.

`cases` lists the runs, `matrix` is the program. Imports `samebit.recipes.verl_grpo`, which starts them.
"""
