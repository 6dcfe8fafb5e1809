"""Answer for `samebit check` and `samebit bench`: is the promise kept on this machine, and how fast is it?

`audit` puts the rows together; every other module makes some of them.
"""
