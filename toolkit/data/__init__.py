"""From a job's data section to each rank's micro-batches: deterministic, resumable, whatever the number of ranks.

`prepare` goes through sources, formats, store and packing; `loader` fetches the rows and `collate` makes tensors.
"""
