"""From a job's data section to each rank's micro-batches: deterministic and resumable on any number of ranks.

`prepare` runs sources, formats, store and packing; `loader` fetches the rows and `collate` builds tensors.
"""
