"""The job: its schema, the loader of job files, and problems with the keys that they are about."""
