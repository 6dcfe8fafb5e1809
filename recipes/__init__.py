"""Train with samebit: these scripts are the first thing that a user runs."""
