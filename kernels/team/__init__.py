"""Share out the items of a kernel among a team of threads by work stealing, so that a late thread holds up nobody.

`sharing` is what each thread does, compiled; `team` starts and ends the threads; `places` chooses the processors that
each is bound to; `current` tells compiled code which team its thread has. Imports nothing of samebit.
"""
