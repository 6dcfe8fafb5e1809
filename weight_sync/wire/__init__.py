"""Define the protocol of a link, whatever carries it: announcement, buckets, records, deltas; sender and receiver.

The way through: `sender` fills `buckets` from a `stream` (`sharded`: of tensors spread over ranks; `delta`: differences
alone) and hands them to a `link`; `receiver` reads them from its end of the link into a `destination`. `decoding` reads
messages, `patience` limits waits. Imports `manifest`, `report`, `digest`, `source`, `apply` and `closing`.
"""
