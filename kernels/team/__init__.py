"""Share out the items of kernels among threads that wait for nobody who is late.

`sharing` is the compiled part, what each thread does; `team` starts the threads and ends them; `places` says on which
processor each runs, and `current` is how compiled code finds the team of its thread. Imports nothing of samebit.
"""
