"""Share out the items of kernels among threads that wait for nobody who is late.

`sharing` is what each thread does, compiled; `team` starts threads and ends them; `places` chooses the processor of
each, and `current` tells compiled code the team of its thread. Imports nothing of samebit.
"""
