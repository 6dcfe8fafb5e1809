"""Run the rounds of a comparison: contestants take turns, disturbed rounds are dropped, results are written.

The way through: `turns` runs them, by `machine_noise`; `stepped_engines` steps engines by hand; `limited` gives a part
a process and a limit, `failures_at_once` has its tests say why they fail before that; `parts_file` keeps the parts of a
long measurement. `results_file` writes, `table` and `mismatch_report` show; `command_line` has the options that most
benchmarks share. Imports `samebit.rollout`, to step engines.
"""
