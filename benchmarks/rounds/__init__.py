"""Run the rounds of a comparison: contestants take turns, disturbed rounds are dropped, results are written."""
