"""Define the protocol of a link, whatever carries it: announcement, buckets, records, deltas; sender and receiver.

The way through: `sender` fills `buckets` from a `stream` and hands them to a `link`; `receiver` reads them from its end
of the link into a `destination`. Imports `manifest`, `report`, `digest`, `source` and `apply`.
"""
