"""The job: its schema, the loader of job files, and problems that name the keys they are about."""
