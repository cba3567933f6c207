"""The end of a run that hangs: what each rank does, which of them holds up the others, and the error that names it."""
